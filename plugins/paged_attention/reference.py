"""NumPy reference of `plancast::PagedAttention`: the truth that each kernel is tested against.

Sequences lie end to end in the flat batch. Sequence `b` owns the rows `query_starts[b]:query_starts[b+1]` and the
blocks `block_ids[block_starts[b]:block_starts[b+1]]`; its new tokens take the positions `past_lens[b]` onwards. The
new keys and values are written into their blocks first, then each query attends causally over past and new tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention.kv_formats import KvFormat
from plugins.paged_attention.kv_formats import rotate as rotated

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


def reference(
    query: Floats,
    key: Floats,
    value: Floats,
    key_cache: Floats,
    value_cache: Floats,
    past_lens: Ints,
    query_starts: Ints,
    block_ids: Ints,
    block_starts: Ints,
    max_context_len: int | Ints,
    sinks: Floats | None = None,
    alibi_slopes: Floats | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    block_size: int,
    key_format: KvFormat | None = None,
    value_format: KvFormat | None = None,
    rotate: str = "none",
) -> Floats:
    """Attend over the paged cache, after writing the new tokens into it in place.

    Args:
        query: [T, num_heads * head_size]; RoPE and norms already applied.
        key: [T, num_kv_heads * head_size].
        value: [T, num_kv_heads * v_head_size].
        key_cache: [num_blocks, num_kv_heads, block_size, head_size], written in place; u8 pages [num_blocks,
            num_kv_heads, block_size * cell bytes] where `key_format` is given (see `kv_formats.py`).
        value_cache: [num_blocks, num_kv_heads, block_size, v_head_size], written in place; or pages.
        past_lens: [B] tokens that each sequence already has in the cache.
        query_starts: [B+1] first row of each sequence; the last entry is T. A sequence may have no new row.
        block_ids: [N] the block tables end to end; each covers past and new tokens, and may have spare blocks.
        block_starts: [B+1] first entry of each table; the last is N.
        max_context_len: the largest past + new of any sequence (an upper bound will do).
        sinks: [num_heads] a logit that takes part in the softmax's sum and has no value (attention sinks).
        alibi_slopes: [num_heads] adds `slope * (key position - query position)` to the logits (Press et al. 2021).
        scale: multiplies the dot products.
        sliding_window: tokens that a query sees, itself included; 0 sees all.
        softcap: `softcap * tanh(logit / softcap)` on the scaled dot products; 0 is off (Gemma 2).
        rotate: none | key | value | both: what is stored after a Walsh-Hadamard transform. Queries are transformed with
            the keys, and the result is transformed back with the values.

    Returns:
        attention [T, num_heads * v_head_size], in query's dtype. The sums run in f32 (f64 for f64 input).

    Raises:
        ValueError: an input's shape does not fit the attributes, or a table does not cover its sequence.
    """
    T = query.shape[0]
    _check_shapes(
        {"query": query, "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache},
        {
            "query": (T, num_heads * head_size),
            "key": (T, num_kv_heads * head_size),
            "value": (T, num_kv_heads * v_head_size),
            "key_cache": _cache_shape(None, num_kv_heads, block_size, head_size, key_format),
            "value_cache": _cache_shape(key_cache.shape[0], num_kv_heads, block_size, v_head_size, value_format),
        },
    )
    if rotate not in ("none", "key", "value", "both"):
        raise ValueError(f"rotate is {rotate!r}; none, key, value or both")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None and per_head.shape != (num_heads,):
            raise ValueError(f"{name} has shape {per_head.shape}, expected ({num_heads},)")
    _check_tables(past_lens, query_starts, block_ids, block_starts, max_context_len, T, key_cache.shape[0], block_size)

    compute = np.float64 if query.dtype == np.float64 else np.float32
    group = num_heads // num_kv_heads
    q_TKGD = query.reshape(T, num_kv_heads, group, head_size).astype(compute)
    k_TKD = key.reshape(T, num_kv_heads, head_size)
    v_TKD = value.reshape(T, num_kv_heads, v_head_size)
    if rotate in ("key", "both"):
        q_TKGD, k_TKD = rotated(q_TKGD).astype(compute), rotated(k_TKD)
    if rotate in ("value", "both"):
        v_TKD = rotated(v_TKD)
    sinks_KG11 = np.full(num_heads, -np.inf, compute) if sinks is None else sinks.astype(compute)
    sinks_KG11 = sinks_KG11.reshape(num_kv_heads, group, 1, 1)
    out_TKGD = np.zeros((T, num_kv_heads, group, v_head_size), compute)

    # Write everything first: sequences may share blocks (a common prefix), never the cells that they write.
    spans = []
    for b, past in enumerate(past_lens.tolist()):
        rows = slice(int(query_starts[b]), int(query_starts[b + 1]))
        total = past + rows.stop - rows.start
        table = block_ids[block_starts[b] : block_starts[b + 1]]
        positions = np.arange(past, total)
        blocks, cells = table[positions // block_size], positions % block_size
        _write(key_cache, blocks, cells, k_TKD[rows], block_size, key_format)
        _write(value_cache, blocks, cells, v_TKD[rows], block_size, value_format)
        spans.append((rows, past, total, table))

    for rows, past, total, table in spans:
        if rows.start == rows.stop:
            continue
        used = table[: -(-total // block_size)]
        k_KSD = _gather(key_cache, used, total, block_size, head_size, key_format).astype(compute)
        v_KSD = _gather(value_cache, used, total, block_size, v_head_size, value_format).astype(compute)
        logits_KGTS = np.einsum("tkgd,ksd->kgts", q_TKGD[rows], k_KSD, optimize=True) * compute(scale)
        if softcap:
            logits_KGTS = softcap * np.tanh(logits_KGTS / compute(softcap))
        distance_TS = np.arange(total)[None, :] - np.arange(past, total)[:, None]  # key minus query position
        if alibi_slopes is not None:
            slopes_KG = alibi_slopes.reshape(num_kv_heads, group).astype(compute)
            logits_KGTS = logits_KGTS + slopes_KG[:, :, None, None] * distance_TS.astype(compute)
        visible_TS = distance_TS <= 0
        if sliding_window:
            visible_TS &= distance_TS > -sliding_window
        logits_KGTS = np.where(visible_TS, logits_KGTS, -np.inf)
        # A sink is one more logit, with no value; without sinks it weighs nothing.
        peak = np.maximum(logits_KGTS.max(axis=-1, keepdims=True), sinks_KG11)
        weights_KGTS = np.exp(logits_KGTS - peak)
        sums = weights_KGTS.sum(axis=-1, keepdims=True) + np.exp(sinks_KG11 - peak)
        out_TKGD[rows] = np.einsum("kgts,ksd->tkgd", weights_KGTS / sums, v_KSD, optimize=True)
    if rotate in ("value", "both"):
        out_TKGD = rotated(out_TKGD).astype(compute)
    return out_TKGD.reshape(T, num_heads * v_head_size).astype(query.dtype)


def _cache_shape(
    num_blocks: int | None, heads: int, block_size: int, size: int, form: KvFormat | None
) -> tuple[int | None, ...]:
    if form is None:
        return num_blocks, heads, block_size, size
    return num_blocks, heads, block_size * form.cell_bytes(size)


def _write(cache: NDArray, blocks: Ints, cells: Ints, rows: Floats, block_size: int, form: KvFormat | None) -> None:
    """Store rows [t, num_kv_heads, size] in the cells of their blocks."""
    if form is None:
        cache[blocks, :, cells] = rows
    else:
        form.write(cache, blocks, cells, rows.astype(np.float32), block_size)


def _gather(cache: NDArray, blocks: Ints, total: int, block_size: int, size: int, form: KvFormat | None) -> Floats:
    """A sequence's cells [num_kv_heads, total, size] out of its blocks [num_blocks, num_kv_heads, cells, size]."""
    cells = cache[blocks] if form is None else form.read(cache, blocks, block_size, size)
    return cells.transpose(1, 0, 2, 3).reshape(cells.shape[1], -1, size)[:, :total]


def _check_shapes(arrays: dict[str, Floats], expected: dict[str, tuple[int | None, ...]]) -> None:
    for name, array in arrays.items():
        shape = expected[name]
        fits = array.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(array.shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")


def _check_tables(
    past_lens: Ints,
    query_starts: Ints,
    block_ids: Ints,
    block_starts: Ints,
    max_context_len: int | Ints,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> None:
    B = past_lens.shape[0]
    for name, starts, end in (
        ("query_starts", query_starts, num_tokens),
        ("block_starts", block_starts, block_ids.shape[0]),
    ):
        if starts.shape != (B + 1,) or starts[0] != 0 or starts[-1] != end or (np.diff(starts) < 0).any():
            raise ValueError(f"{name} must rise from 0 to {end} over {B + 1} entries, got {starts.tolist()}")
    if (past_lens < 0).any():
        raise ValueError(f"past_lens holds a negative length: {past_lens.tolist()}")
    if block_ids.size and (block_ids.min() < 0 or block_ids.max() >= num_blocks):
        raise ValueError(f"block_ids must lie in 0..{num_blocks - 1}, got {block_ids.min()}..{block_ids.max()}")
    totals = past_lens + np.diff(query_starts)
    room = np.diff(block_starts) * block_size
    if (totals > room).any():
        b = int(np.argmax(totals > room))
        raise ValueError(f"sequence {b} has {totals[b]} tokens, and its table has room for {room[b]}")
    if B and totals.max() > int(max_context_len):
        raise ValueError(f"max_context_len is {int(max_context_len)}, and a sequence has {totals.max()} tokens")
