"""`plancast::PagedAttention` on torch tensors: by the NumPy reference, or by the Triton kernels."""

# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plugins.paged_attention.kv_formats import KvFormat
from plugins.paged_attention.native import formats
from plugins.paged_attention.reference import reference


@dataclass(frozen=True)
class Layer:
    """One attention node: its formats, and what the reference takes as attributes."""

    index: int
    key_format: KvFormat
    value_format: KvFormat
    rotate: str  # none, key, value, both
    attributes: dict[str, Any]

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> Layer:
        """From a node's attributes (see `op.py`)."""
        names = ("num_heads", "num_kv_heads", "head_size", "v_head_size", "scale", "sliding_window", "softcap")
        rest = {name: attributes[name] for name in (*names, "block_size") if name in attributes}
        key, value = formats(attributes)
        return cls(attributes["layer"], key, value, attributes.get("rotate", "none"), rest)

    def block_bytes(self) -> tuple[int, int]:
        """Bytes of a block of keys and of a block of values."""
        a = self.attributes
        cells = a["num_kv_heads"] * a["block_size"]
        return cells * self.key_format.cell_bytes(a["head_size"]), cells * self.value_format.cell_bytes(
            a["v_head_size"]
        )

    def pages(self, key_memory: Tensor, value_memory: Tensor) -> tuple[Tensor, Tensor]:
        """Flat memory u8 [num_blocks, block bytes] as pages u8 [num_blocks, Hkv, page bytes]."""
        heads = self.attributes["num_kv_heads"]
        return key_memory.unflatten(1, (heads, -1)), value_memory.unflatten(1, (heads, -1))


class Turn(NamedTuple):
    """Rotary embedding of queries and keys on the way: angles [rows, rotary / 2], of each token the row, and how."""

    cos: Tensor
    sin: Tensor
    rows: Tensor
    rotary: int
    interleaved: bool


def attend_by_reference(
    layer: Layer, query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], tables: list[Tensor],
    max_context_len: int, sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """On the CPU; writes the new keys and values and attends in f32."""
    result = reference(
        *(_array(x) for x in (query, key, value)), *(page.numpy() for page in pages), *(t.numpy() for t in tables),
        max_context_len, _array(sinks), _array(alibi_slopes),
        **layer.attributes, key_format=layer.key_format, value_format=layer.value_format, rotate=layer.rotate,
    )  # fmt: skip
    return torch.from_numpy(np.ascontiguousarray(result)).to(query.dtype)


def attend_by_kernels(
    layer: Layer, query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], tables: list[Tensor],
    max_context_len: int, sinks: Tensor | None, alibi_slopes: Tensor | None, turn: Turn | None = None,
) -> Tensor:  # fmt: skip
    """By the Triton kernels: on a GPU, or interpreted on a CPU (TRITON_INTERPRET=1). With `turn`, no `kv.rotate`."""
    from plugins.paged_attention import torch_kernel

    native = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 9)
    shape = torch_kernel.AttentionShape(
        **layer.attributes, key_format=layer.key_format, value_format=layer.value_format, native_fp8=native
    )
    if layer.rotate in ("key", "both"):
        query, key = (rotated(x, layer.attributes["head_size"]) for x in (query, key))
    if layer.rotate in ("value", "both"):
        value = rotated(value, layer.attributes["v_head_size"])
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    if turn is None:
        query = query.contiguous()
        torch_kernel.write(shape, key, value, *pages, *tables)
    else:
        query = query if query.stride(-1) == 1 else query.contiguous()
        turned = torch_kernel.write(
            shape, key, value, *pages, *tables, query=query, cos=turn.cos, sin=turn.sin, positions=turn.rows,
            rotary=turn.rotary, interleaved=turn.interleaved,
        )  # fmt: skip
        assert turned is not None
        query = turned
    result = torch_kernel.attention(shape, query, *pages, *tables, max_context_len, sinks, alibi_slopes)
    return rotated(result, layer.attributes["v_head_size"]) if layer.rotate in ("value", "both") else result


def splits_of(layer: Layer, sequences: int, max_context_len: int, device: torch.device) -> int:
    """In how many pieces `attend_by_kernels` takes the keys of a decode step."""
    from plugins.paged_attention import torch_kernel

    return torch_kernel.splits_for(sequences * layer.attributes["num_kv_heads"], max_context_len, device)


def rotated(x: Tensor, size: int) -> Tensor:
    """The Walsh-Hadamard transform of each head of `x` [T, heads * size], as `kv_formats.rotate` does it."""
    block = size & -size
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.float().unflatten(-1, (-1, block)) @ (matrix * block**-0.5)).flatten(-2).to(x.dtype)


def _array(x: Tensor | None) -> Any:
    return None if x is None else x.float().numpy()
