"""Launches the Triton kernels of `plancast::PagedAttention` on torch tensors: on a GPU, or interpreted on a CPU.

Caches are u8 pages `[num_blocks, Hkv, block_size * cell_bytes]` (see `kv_formats.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from plugins.paged_attention.grids import BLOCK_N, COPY_WORDS, attend_grid, choose_splits, copy_waves, merge_constants
from plugins.paged_attention.kernel import attend, reduce_splits
from plugins.paged_attention.kernel_write import copy_blocks, rope_and_write, swap_blocks
from plugins.paged_attention.kv_formats import KvFormat

_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_F32 = KvFormat("f32")


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed of an attention layer; names as in the operator's schema."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    block_size: int
    key_format: KvFormat = _F32
    value_format: KvFormat = _F32
    sliding_window: int = 0
    softcap: float = 0.0
    native_fp8: bool = False  # the device converts fp8 (SM89 on)

    def constants(self) -> dict[str, Any]:
        """Compile-time constants that writing and attending share. Raises `ValueError` on pages of odd size."""
        values: dict[str, Any] = {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_SIZE": self.head_size,
            "V_HEAD_SIZE": self.v_head_size,
            "BLOCK_SIZE": self.block_size,
        }
        for name, form, size in (
            ("KEY", self.key_format, self.head_size),
            ("VALUE", self.value_format, self.v_head_size),
        ):
            page = self.block_size * form.cell_bytes(size)
            if form.packed and (page % 2 or self.block_size * form.data_bytes(size) % 2):
                raise ValueError(f"{form.dtype} pages of {self.block_size} cells of {size} elements have an odd size")
            values |= {
                f"{name}_FORMAT": format_name(form),
                f"{name}_GROUP": form.group_size,
                f"{name}_STATIC": float(np.float32(form.static_scale)),
                f"{name}_PAGE": page if form.packed else self.block_size * size,
            }
            width = form.data_bytes(size) if form.packed else size
            values["BLOCK_D" if name == "KEY" else "BLOCK_DV"] = max(16, triton.next_power_of_2(width))
        return values

    def attend_constants(self, *, sinks: bool, alibi: bool, splits: int, block_m: int, block_n: int) -> dict[str, Any]:
        """Compile-time constants of `attend`."""
        constants = self.constants()
        if self.native_fp8:
            for name in ("KEY_FORMAT", "VALUE_FORMAT"):
                constants[name] += "_native" if constants[name].startswith("fp8") else ""
        return constants | {
            "SCALE": self.scale,
            "SLIDING_WINDOW": self.sliding_window,
            "SOFTCAP": self.softcap,
            "SINKS": sinks,
            "ALIBI": alibi,
            "SPLITS": splits,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        }

    def write_constants(
        self, *, rotary: int, interleaved: bool, rows: tuple[int, int, int] | None = None
    ) -> dict[str, Any]:
        """Compile-time constants of `rope_and_write`. `rows`: how many elements the rows of queries, of keys and of
        values are apart (default: as many as they have)."""
        keys = self.num_kv_heads * self.head_size
        rows = rows or (self.num_heads * self.head_size, keys, self.num_kv_heads * self.v_head_size)
        return self.constants() | {
            **dict(zip(("QUERY_ROW", "KEY_ROW", "VALUE_ROW"), rows, strict=True)),
            "ROTARY": rotary,
            "INTERLEAVED": interleaved,
            "BLOCK_Q": max(16, triton.next_power_of_2(self.head_size)),
        }


def format_name(form: KvFormat) -> str:
    """A format as the kernels name it."""
    if not form.packed:
        return "float"
    return "int4z" if form.dtype == "int4" and form.zero_point else form.dtype


def typed(cache: torch.Tensor, form: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as their cells' type, and as the bf16 numbers that scales are (the same memory)."""
    if not form.packed:
        cells = cache if cache.dtype != torch.uint8 else cache.view(_DENSE[form.dtype])
        return cells, cells
    return cache.view(torch.int8) if form.dtype == "int8" else cache, cache.view(torch.bfloat16)


def write(
    shape: AttentionShape,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    past_lens: torch.Tensor,
    query_starts: torch.Tensor,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    rotary: int = 0,
    interleaved: bool = False,
) -> torch.Tensor | None:
    """Quantize new keys [T, Hkv * D] and values into their cells; with `rotary` > 0 also turn keys and `query`.

    Rows may be apart, as parts of a merged product are; their elements may not. `cos` and `sin` are [positions,
    rotary / 2]. Returns the turned query [T, num_heads * D], or None without one.
    """
    tokens, sequences = key.shape[0], past_lens.shape[0]
    if tokens == 0:
        return query
    key_cells, key_scales = typed(key_cache, shape.key_format)
    value_cells, value_scales = typed(value_cache, shape.value_format)
    turned = query
    if query is not None and rotary:
        turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rows = (key if query is None else query).stride(0), key.stride(0), value.stride(0)
    heads = shape.num_kv_heads + (shape.num_heads if query is not None and rotary else 0)
    unused = past_lens
    rope_and_write[(tokens, heads)](
        key if query is None else query, key, value, unused if cos is None else cos, unused if sin is None else sin,
        unused if positions is None else positions, past_lens, query_starts, block_ids, block_starts,
        key if turned is None else turned, key_cells, value_cells, key_scales, value_scales, sequences,
        **shape.write_constants(rotary=rotary, interleaved=interleaved, rows=rows), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return turned


def attention(
    shape: AttentionShape,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    past_lens: torch.Tensor,
    query_starts: torch.Tensor,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    max_context_len: int,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    block_m: int | None = None,
    block_n: int = BLOCK_N,
) -> torch.Tensor:
    """Attend over pages that hold past and new tokens (see `write`): [T, num_heads * DV] in the query's dtype.

    `splits` (default: enough to fill the device) and the tile sizes change speed and rounding alone; where they are
    given, the launch depends on shapes only, as a CUDA graph needs it.
    """
    tokens, sequences = query.shape[0], past_lens.shape[0]
    output = torch.empty(tokens, shape.num_heads * shape.v_head_size, dtype=query.dtype, device=query.device)
    if tokens == 0:
        return output
    group = shape.num_heads // shape.num_kv_heads
    if block_m is None:  # a decode needs few rows, a prefill many
        block_m = max(16 if tokens < 4 * sequences else 64, triton.next_power_of_2(group))
    if splits is None:
        splits = splits_for(sequences * shape.num_kv_heads, max_context_len, query.device, block_n)
    partial = stats = output
    if splits > 1:
        new = {"dtype": torch.float32, "device": query.device}
        partial = torch.empty(splits, tokens, shape.num_heads, shape.v_head_size, **new)
        stats = torch.empty(splits, tokens, shape.num_heads, 2, **new)
    key_cells, key_scales = typed(key_cache, shape.key_format)
    value_cells, value_scales = typed(value_cache, shape.value_format)
    attend[attend_grid(tokens, sequences, group, shape.num_kv_heads, block_m, splits)](
        query, key_cells, value_cells, key_scales, value_scales, past_lens, query_starts, block_ids, block_starts,
        query if sinks is None else sinks, query if alibi_slopes is None else alibi_slopes,
        output, partial, stats, tokens, sequences,
        **shape.attend_constants(
            sinks=sinks is not None, alibi=alibi_slopes is not None, splits=splits, block_m=block_m, block_n=block_n
        ),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        rows = tokens * shape.num_heads
        reduce_splits[(rows,)](partial, stats, output, rows, **merge_constants(shape.v_head_size, splits))
    return output


def splits_for(programs: int, max_context_len: int, device: torch.device, block_n: int = BLOCK_N) -> int:
    """In how many pieces `attention` takes the keys unless told, for `programs` sequences x key/value heads."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return choose_splits(programs, max_context_len, block_n, count)


def copy(caches: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy (source, target) blocks in every cache [num_blocks, ...], as if one after the other."""
    for wave in copy_waves(copies):
        _copy_wave(caches, wave)


def _copy_wave(caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    for bases, nbytes in _by_block_size(caches):
        word, words = _words(nbytes)
        device = caches[0].device
        table = torch.tensor(pairs, dtype=torch.int32, device=device)
        grid = (len(pairs), len(bases), triton.cdiv(words, COPY_WORDS))
        copy_blocks[grid](torch.tensor(bases, device=device), table, words, WORD=word, BLOCK=COPY_WORDS)


def swap_out(caches: Sequence[torch.Tensor], block_ids: Sequence[int]) -> list[torch.Tensor]:
    """The blocks of every cache, gathered: u8 [blocks, caches, block bytes], one tensor for each size of block."""
    staged = []
    for bases, nbytes in _by_block_size(caches):
        staging = torch.empty(len(block_ids), len(bases), nbytes, dtype=torch.uint8, device=caches[0].device)
        _swap(bases, block_ids, staging, to_staging=True)
        staged.append(staging)
    return staged


def swap_in(caches: Sequence[torch.Tensor], block_ids: Sequence[int], staged: Sequence[torch.Tensor]) -> None:
    """Put back what `swap_out` returned, into any blocks."""
    for (bases, _), staging in zip(_by_block_size(caches), staged, strict=True):
        _swap(bases, block_ids, staging, to_staging=False)


def _swap(bases: list[int], block_ids: Sequence[int], staging: torch.Tensor, *, to_staging: bool) -> None:
    if not block_ids:
        return
    word, words = _words(staging.shape[-1])
    kind = {tl.int64: torch.int64, tl.int32: torch.int32, tl.int8: torch.int8}[word]
    ids = torch.tensor(block_ids, dtype=torch.int32, device=staging.device)
    grid = (len(block_ids), len(bases), triton.cdiv(words, COPY_WORDS))
    swap_blocks[grid](
        torch.tensor(bases, device=staging.device), ids, staging.view(kind), words,
        TO_STAGING=to_staging, WORD=word, BLOCK=COPY_WORDS,
    )  # fmt: skip


def _by_block_size(caches: Sequence[torch.Tensor]) -> list[tuple[list[int], int]]:
    """The caches' addresses, by the bytes of a block."""
    groups: dict[int, list[int]] = {}
    for cache in caches:
        groups.setdefault(cache[0].numel() * cache.element_size(), []).append(cache.data_ptr())
    return [(bases, nbytes) for nbytes, bases in groups.items()]


def _words(nbytes: int) -> tuple[Any, int]:
    """The widest word that divides a block, and how many a block has."""
    for word, width in ((tl.int64, 8), (tl.int32, 4)):
        if nbytes % width == 0:
            return word, nbytes // width
    return tl.int8, nbytes
