"""`plancast::PagedAttention` in Triton: flash attention over CSR block tables, decode and prefill in one launch.

A program attends for one tile of query rows of one sequence, one key/value head and one split of the keys. The rows of
a tile are `tokens x query heads of the group` (GQA packed), so that a decode step's products are tall enough for the
tensor cores. With more than one split (flash decoding, Dao et al. 2023) each leaves a partial result that `_reduce`
merges. The cells' formats are decoded in registers (`cells.py`); scales multiply scores and weights, not elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.gpu.kernel_numbers import dequantized
from plugins.paged_attention.kernel_cells import cell_scale, load_half

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of_tile(tile, query_starts, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that owns tile number `tile`, where sequence `b`'s tiles begin at `query_starts[b] // Q + b`."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle) // BLOCK_Q + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend(
    query,  # [T, num_heads * D]
    key_cache,  # pages of num_blocks x Hkv, in the cells' type (u8 for fp8 and int4)
    value_cache,
    key_scales,  # the same memory as bf16
    value_scales,
    past_lens,
    query_starts,
    block_ids,
    block_starts,
    sinks,  # [num_heads] or a dummy
    alibi_slopes,  # [num_heads] or a dummy
    output,  # [T, num_heads * DV]; unused with several splits
    partial,  # f32 [splits, T, num_heads, DV]; unused with one
    partial_stats,  # f32 [splits, T, num_heads, 2]: maximum (base 2) and sum
    num_tokens,
    num_sequences,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_STATIC: tl.constexpr,
    KEY_PAGE: tl.constexpr,  # elements of the cache from page to page
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_STATIC: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    b = sequence_of_tile(tile, query_starts, num_sequences, BLOCK_Q)
    row_start = tl.load(query_starts + b)
    new = tl.load(query_starts + b + 1) - row_start
    first = (tile - row_start // BLOCK_Q - b) * BLOCK_Q  # token of the sequence's new ones
    if first >= new:
        return
    past = tl.load(past_lens + b)
    table = block_ids + tl.load(block_starts + b)

    m = tl.arange(0, BLOCK_M)
    token_M = first + m // GROUP
    head_M = kv_head * GROUP + m % GROUP
    live_M = (m < BLOCK_Q * GROUP) & (token_M < new)
    position_M = past + token_M
    row_M = (row_start + token_M).to(tl.int64)

    query_MD = query + (row_M * NUM_HEADS + head_M)[:, None] * HEAD_SIZE
    # Int4 cells hold two elements a byte: the lower and the higher half of a head are multiplied apart.
    KEY_INT4: tl.constexpr = KEY_FORMAT == "int4" or KEY_FORMAT == "int4z"
    VALUE_INT4: tl.constexpr = VALUE_FORMAT == "int4" or VALUE_FORMAT == "int4z"
    KEY_BYTES: tl.constexpr = HEAD_SIZE // 2 if KEY_INT4 else HEAD_SIZE  # elements of the cache a cell
    VALUE_BYTES: tl.constexpr = V_HEAD_SIZE // 2 if VALUE_INT4 else V_HEAD_SIZE
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    inside_MD = live_M[:, None] & (d < KEY_BYTES)[None, :]
    q_MD = tl.load(query_MD + d[None, :], mask=inside_MD, other=0.0)
    q_high_MD = q_MD
    if KEY_INT4:
        q_high_MD = tl.load(query_MD + KEY_BYTES + d[None, :], mask=inside_MD, other=0.0)

    maximum_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # The sink is one more score: the first split counts it.
        sink_M = tl.load(sinks + head_M, mask=live_M, other=0.0).to(tl.float32) * _LOG2E
        if split == 0:
            maximum_M = sink_M
            sum_M += 1.0
    if ALIBI:
        slope_M = tl.load(alibi_slopes + head_M, mask=live_M, other=0.0).to(tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_high_MD = acc_MD

    # Keys that some row of the tile sees, in tiles of BLOCK_N, shared out over the splits.
    last = tl.minimum(past + first + BLOCK_Q, past + new)
    begin = 0
    if SLIDING_WINDOW > 0:
        begin = tl.maximum(past + first - SLIDING_WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(last - begin, BLOCK_N)
    share = tl.cdiv(tiles, SPLITS)
    end = tl.minimum(begin + (split + 1) * share * BLOCK_N, last)
    begin += split * share * BLOCK_N

    n = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        position_N = start + n
        inside_N = position_N < last
        block_N = tl.load(table + position_N // BLOCK_SIZE, mask=inside_N, other=0).to(tl.int64)
        cell_N = position_N % BLOCK_SIZE
        page_N = block_N * NUM_KV_HEADS + kv_head
        k_ND = tl.load(
            (key_cache + page_N * KEY_PAGE + cell_N * KEY_BYTES)[:, None] + d[None, :],
            mask=inside_N[:, None] & (d < KEY_BYTES)[None, :],
            other=0,
        )
        if KEY_FORMAT == "float":
            score_MN = tl.dot(q_MD, k_ND.to(q_MD.dtype).trans(), input_precision="ieee") * SCALE
        else:
            scales_N = key_scales + page_N * (KEY_PAGE // 2) + BLOCK_SIZE * KEY_BYTES // 2
            if KEY_INT4:
                k_low_ND = load_half(
                    k_ND, scales_N, cell_N, inside_N, 0, BLOCK_SIZE, HEAD_SIZE, KEY_FORMAT, KEY_GROUP, BLOCK_D,
                    q_MD.dtype,
                )  # fmt: skip
                k_high_ND = load_half(
                    k_ND, scales_N, cell_N, inside_N, 1, BLOCK_SIZE, HEAD_SIZE, KEY_FORMAT, KEY_GROUP, BLOCK_D,
                    q_MD.dtype,
                )  # fmt: skip
                score_MN = tl.dot(q_MD, k_low_ND.trans(), input_precision="ieee")
                score_MN = tl.dot(q_high_MD, k_high_ND.trans(), score_MN, input_precision="ieee") * SCALE
            else:
                k_ND = dequantized(k_ND, KEY_FORMAT, q_MD.dtype)
                scale_N = cell_scale(scales_N, cell_N, inside_N, BLOCK_SIZE, HEAD_SIZE, KEY_STATIC)
                score_MN = tl.dot(q_MD, k_ND.trans(), input_precision="ieee") * (scale_N * SCALE)[None, :]
        if SOFTCAP > 0:
            # tanh by exp, of minus the magnitude: no overflow.
            ratio = tl.exp2(tl.abs(score_MN) * (-2.0 * _LOG2E / SOFTCAP))
            bounded = (1.0 - ratio) / (1.0 + ratio) * SOFTCAP
            score_MN = tl.where(score_MN < 0, -bounded, bounded)
        distance_MN = position_N[None, :] - position_M[:, None]
        if ALIBI:
            score_MN += slope_M[:, None] * distance_MN.to(tl.float32)
        visible_MN = (distance_MN <= 0) & inside_N[None, :] & live_M[:, None]
        if SLIDING_WINDOW > 0:
            visible_MN = visible_MN & (distance_MN > -SLIDING_WINDOW)
        score_MN = tl.where(visible_MN, score_MN * _LOG2E, float("-inf"))

        peak_M = tl.maximum(maximum_M, tl.max(score_MN, 1))
        safe_M = tl.where(peak_M == float("-inf"), 0.0, peak_M)  # a row that sees nothing of this tile
        weight_MN = tl.exp2(score_MN - safe_M[:, None])
        shrink_M = tl.exp2(maximum_M - safe_M)
        sum_M = sum_M * shrink_M + tl.sum(weight_MN, 1)
        maximum_M = peak_M
        acc_MD *= shrink_M[:, None]

        v_ND = tl.load(
            (value_cache + page_N * VALUE_PAGE + cell_N * VALUE_BYTES)[:, None] + dv[None, :],
            mask=inside_N[:, None] & (dv < VALUE_BYTES)[None, :],
            other=0,
        )
        if VALUE_FORMAT == "float":
            acc_MD = tl.dot(weight_MN.to(q_MD.dtype), v_ND.to(q_MD.dtype), acc_MD, input_precision="ieee")
        else:
            scales_N = value_scales + page_N * (VALUE_PAGE // 2) + BLOCK_SIZE * VALUE_BYTES // 2
            if VALUE_INT4:
                weight_MN = weight_MN.to(q_MD.dtype)
                v_low_ND = load_half(
                    v_ND, scales_N, cell_N, inside_N, 0, BLOCK_SIZE, V_HEAD_SIZE, VALUE_FORMAT, VALUE_GROUP, BLOCK_DV,
                    q_MD.dtype,
                )  # fmt: skip
                v_high_ND = load_half(
                    v_ND, scales_N, cell_N, inside_N, 1, BLOCK_SIZE, V_HEAD_SIZE, VALUE_FORMAT, VALUE_GROUP, BLOCK_DV,
                    q_MD.dtype,
                )  # fmt: skip
                acc_MD = tl.dot(weight_MN, v_low_ND, acc_MD, input_precision="ieee")
                acc_high_MD *= shrink_M[:, None]
                acc_high_MD = tl.dot(weight_MN, v_high_ND, acc_high_MD, input_precision="ieee")
            else:
                scale_N = cell_scale(scales_N, cell_N, inside_N, BLOCK_SIZE, V_HEAD_SIZE, VALUE_STATIC)
                weight_MN = (weight_MN * scale_N[None, :]).to(q_MD.dtype)
                v_ND = dequantized(v_ND, VALUE_FORMAT, q_MD.dtype)
                acc_MD = tl.dot(weight_MN, v_ND, acc_MD, input_precision="ieee")

    out_M = row_M * NUM_HEADS + head_M
    if SPLITS > 1:
        out_M += split.to(tl.int64) * num_tokens * NUM_HEADS
        tl.store(partial_stats + 2 * out_M, maximum_M, mask=live_M)
        tl.store(partial_stats + 2 * out_M + 1, sum_M, mask=live_M)
        target = partial
    else:
        divisor_M = tl.where(sum_M > 0, sum_M, 1.0)
        acc_MD /= divisor_M[:, None]
        acc_high_MD /= divisor_M[:, None]
        target = output
    target_MD = target + out_M[:, None] * V_HEAD_SIZE
    inside_MD = live_M[:, None] & (dv < VALUE_BYTES)[None, :]
    tl.store(target_MD + dv[None, :], acc_MD, mask=inside_MD)
    if VALUE_INT4:
        tl.store(target_MD + VALUE_BYTES + dv[None, :], acc_high_MD, mask=inside_MD)


@triton.jit
def reduce_splits(
    partial,
    partial_stats,
    output,
    num_rows,  # tokens x query heads
    V_HEAD_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge the splits of one (token, head): each is weighted by what its own maximum stands above the common one."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_DV)
    row_S = s.to(tl.int64) * num_rows + row
    maximum_S = tl.load(partial_stats + 2 * row_S, mask=s < SPLITS, other=float("-inf"))
    sum_S = tl.load(partial_stats + 2 * row_S + 1, mask=s < SPLITS, other=0.0)
    peak = tl.max(maximum_S, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # no split saw anything
    weight_S = tl.where(maximum_S == float("-inf"), 0.0, tl.exp2(maximum_S - peak))
    inside = (s < SPLITS)[:, None] & (d < V_HEAD_SIZE)[None, :]
    acc_SD = tl.load(partial + row_S[:, None] * V_HEAD_SIZE + d[None, :], mask=inside, other=0.0)
    total = tl.sum(sum_S * weight_S, 0)
    result_D = tl.sum(acc_SD * weight_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * V_HEAD_SIZE + d, result_D, mask=d < V_HEAD_SIZE)
