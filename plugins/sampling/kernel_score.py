"""Log probabilities in Triton: of one token a row, its rank, and the likeliest tokens; nothing is sorted."""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.sampling.kernel import load_logits, order_key


@triton.jit
def score(
    logits,  # [R, V]
    tokens,  # i32 [R]; a row with a negative one is left out
    num_tops,  # i32 [R]: how many of the likeliest are told, up to `width`; below 0: the row is left out
    stats,  # f32 [R, 3]: the row's peak, the sum of exp(logit - peak), and the token's logit
    ranks,  # i32 [R]: 1 + the number of likelier tokens
    top_ids,  # i32 [R, width]: the likeliest, largest first, the lower id first among equals
    top_values,  # f32 [R, width]: their logits
    size,  # V
    width,
    BLOCK: tl.constexpr,
):
    """Program (row). A logit minus the peak minus the log of the sum is a log probability."""
    r = tl.program_id(0)
    num_top = tl.load(num_tops + r)
    token = tl.load(tokens + r)
    if (num_top < 0) | (token < 0):
        return
    row = logits + r.to(tl.int64) * size
    value = tl.load(row + token).to(tl.float32) + 0.0
    peak_B = tl.full([BLOCK], float("-inf"), tl.float32)
    higher_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), size)
        peak_B = tl.maximum(peak_B, x)
        higher_B += (x > value).to(tl.int32)
    peak = tl.max(peak_B, 0)
    sum_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        sum_B += tl.exp(load_logits(row, start + tl.arange(0, BLOCK), size) - peak)
    tl.store(stats + 3 * r, peak)
    tl.store(stats + 3 * r + 1, tl.sum(sum_B, 0))
    tl.store(stats + 3 * r + 2, value)
    tl.store(ranks + r, 1 + tl.sum(higher_B, 0))
    # One pass for each: the largest of what comes after the last one found. No logit's key is 0.
    last_key = tl.max(tl.full([1], 0xFFFFFFFF, tl.uint32), 0)
    last_id = size
    for i in range(num_top):
        best_key = last_key * 0
        best_id = size
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            key = order_key(load_logits(row, ids, size))
            after = (key < last_key) | ((key == last_key) & (ids > last_id))
            key = tl.where((ids < size) & after, key, 0)
            top = tl.max(key, 0)
            at = tl.min(tl.where(key == top, ids, 2147483647), 0)
            best_id = tl.where(top > best_key, at, best_id)
            best_key = tl.maximum(best_key, top)
        tl.store(top_ids + r * width + i, best_id)
        tl.store(top_values + r * width + i, tl.load(row + best_id).to(tl.float32) + 0.0)
        last_key = best_key
        last_id = best_id
