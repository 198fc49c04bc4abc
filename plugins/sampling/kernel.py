"""Sampling in Triton, without sorting the vocabulary: temperature, top-k, top-p, min-p, and speculative verification.

Floats are compared by unsigned keys in the same order. A threshold (the k-th largest logit, the edge of the nucleus)
is found four bits at a time: each pass over the row sums what lies above sixteen candidates, so eight passes find it to
the last bit. The random numbers are those of `runtime/philox.py`: pure functions of (seed, sequence, position, stream).
They pick the token that the runtime's sampler picks: the order in which probabilities are added up is the same. Of rows
that leave many candidates the runtime adds up in another order: `sample` tells them apart and leaves them to it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, sequence, position, STREAM: tl.constexpr):
    """A number f64 in [0, 1) with 53 random bits, by Philox4x32-10 (Salmon et al. 2011)."""
    zero = (position * 0).to(tl.uint32)
    first, second, _, _ = tl.philox_impl(
        zero + position.to(tl.uint32),
        zero + sequence.to(tl.uint32),
        zero + STREAM,
        zero,
        (seed & 0xFFFFFFFF).to(tl.uint32),
        ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
        10,
    )
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) * (2.0**-53)


@triton.jit
def order_key(x):
    """f32 -> u32 in the same order (-0 and 0 alike)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def from_key(key):
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row, ids, size):
    """Logits f32, minus infinity outside; -0 becomes 0."""
    return tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32) + 0.0


@triton.jit
def weight_of(x, peak, inverse_temperature):
    return tl.exp((x - peak) * inverse_temperature)


@triton.jit
def largest_key(
    row, size, lowest, need, peak, inverse_temperature, WEIGHTED: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key such that what lies at or above it (and at or above `lowest`) weighs `need`, or more than that.

    MORE: it must weigh more. Not WEIGHTED: each element weighs 1.
    """
    prefix = lowest * 0
    j = tl.arange(0, 16).to(tl.uint32)
    unit = lowest * 0 + 268435456  # 2^28: the first four bits
    for _ in range(8):  # a loop: unrolled, the kernel is huge
        key_J = prefix + j * unit
        sum_J = tl.zeros([16], tl.float32)
        for start in range(0, size, BLOCK):
            x = load_logits(row, start + tl.arange(0, BLOCK), size)
            key = order_key(x)
            weight = tl.where(key >= lowest, weight_of(x, peak, inverse_temperature) if WEIGHTED else 1.0, 0.0)
            sum_J += tl.sum(tl.where(key[None, :] >= key_J[:, None], weight[None, :], 0.0), 1)
        enough_J = sum_J > need if MORE else sum_J >= need
        digit = tl.maximum(tl.sum(enough_J.to(tl.int32), 0) - 1, 0)
        prefix += digit.to(tl.uint32) * unit
        unit = unit // 16
    return tl.maximum(prefix, lowest)


@triton.jit
def restrict(row, size, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """What of a row may be sampled: its peak, the smallest key that stays, how many equal to that stay (the first),
    the sum of all weights, and how many tokens that are. A peak that is not finite (or NaN) means that nothing can be
    sampled."""
    peak_B = tl.full([BLOCK], float("-inf"), tl.float32)
    broken_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), size)
        peak_B = tl.maximum(peak_B, x)
        broken_B += (x != x).to(tl.int32)
    peak = tl.max(peak_B, 0)
    peak = tl.where(tl.sum(broken_B, 0) > 0, float("nan"), peak)
    inverse_temperature = 1.0 / temperature
    edge = order_key(tl.full([1], -3.4028234663852886e38, tl.float32))  # minus infinity stays out
    edge = tl.max(edge, 0)
    if min_p > 0:
        lowest = tl.full([1], 0.0, tl.float32) + peak + temperature * tl.log(min_p)
        edge = tl.maximum(edge, tl.max(order_key(lowest), 0))
    if (top_k > 0) & (top_k < size):
        everything = edge * 0
        kth = largest_key(row, size, everything, top_k.to(tl.float32), peak, inverse_temperature, False, False, BLOCK)
        edge = tl.maximum(edge, kth)
    ties = size
    if top_p < 1.0:
        all_B = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            x = load_logits(row, start + tl.arange(0, BLOCK), size)
            all_B += tl.where(order_key(x) >= edge, weight_of(x, peak, inverse_temperature), 0.0)
        need = tl.sum(all_B, 0) * top_p
        edge = largest_key(row, size, edge, need, peak, inverse_temperature, True, False, BLOCK)
        above_B = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            x = load_logits(row, start + tl.arange(0, BLOCK), size)
            above_B += tl.where(order_key(x) > edge, weight_of(x, peak, inverse_temperature), 0.0)
        each = tl.exp((from_key(edge) - peak) * inverse_temperature)
        ties = tl.maximum(tl.ceil((need - tl.sum(above_B, 0)) / each).to(tl.int32), 1)
    total_B = tl.zeros([BLOCK], tl.float32)
    count_B = tl.zeros([BLOCK], tl.int32)
    seen = 0
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), size)
        kept, seen = keep(order_key(x), edge, ties, seen)
        total_B += tl.where(kept, weight_of(x, peak, inverse_temperature), 0.0)
        count_B += kept.to(tl.int32)
    return peak, edge, ties, tl.sum(total_B, 0), tl.sum(count_B, 0)


@triton.jit
def keep(key, edge, ties, seen):
    """Which of a tile's elements stay, and how many equal to the edge were seen with it."""
    equal = (key == edge).to(tl.int32)
    kept = (key > edge) | ((equal == 1) & (seen + tl.cumsum(equal, 0) <= ties))
    return kept, seen + tl.sum(equal, 0)


@triton.jit
def greedy(row, size, BLOCK: tl.constexpr):
    """The id of the largest logit, the lowest of several; -1 where that is not finite, or anything is NaN."""
    best = float("-inf")
    at = -1
    broken = 0
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), size)
        top = tl.max(x, 0)
        index = tl.min(tl.where(x == top, tl.arange(0, BLOCK), BLOCK), 0)
        at = tl.where(top > best, start + index, at)
        best = tl.maximum(best, top)
        broken += tl.sum((x != x).to(tl.int32), 0)
    return tl.where((broken > 0) | (best == float("inf")), -1, at)


@triton.jit
def unrestricted(top_k, top_p, min_p):
    """Whether a row is drawn in the order that the runtime has for rows without restrictions."""
    return ((top_k <= 0) & (top_p >= 1.0)) & (min_p <= 0.0)


@triton.jit
def id_of(order, size):
    """The id at a place of the order in which the runtime's sampler adds up the probabilities of rows that nothing
    restricts: a matrix of 64 lines, column by column."""
    columns = tl.cdiv(size, 64)
    ids = (order % 64) * columns + order // 64
    return tl.where(order < 64 * columns, ids, size)


@triton.jit
def draw(row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK: tl.constexpr):
    """The token at `u` times the total of the weights, added up in the order of `id_of`."""
    goal = u * total.to(tl.float64)
    before = goal * 0
    token = -1
    last = -1
    seen = 0
    for start in range(0, 64 * tl.cdiv(size, 64), BLOCK):
        if token < 0:
            order = start + tl.arange(0, BLOCK)
            ids = id_of(order, size)
            x = load_logits(row, ids, size)
            kept, seen = keep(order_key(x), edge, ties, seen)
            weight = tl.where(kept, weight_of(x, peak, inverse_temperature), 0.0).to(tl.float64)
            cumulative = before + tl.cumsum(weight, 0)
            place = tl.min(tl.where((cumulative > goal) & (weight > 0), order, 2147483647), 0)
            final = tl.max(tl.where(weight > 0, order, -1), 0)
            last = tl.where(final >= 0, final, last)
            token = tl.where(place < 2147483647, place, token)
            before += tl.sum(weight, 0)
    # The sum of the tiles may fall short of the total by rounding: then it is the last that has any weight.
    return id_of(tl.where(token >= 0, token, last), size)


@triton.jit
def draw_down(row, size, peak, edge, total, inverse_temperature, u, BLOCK: tl.constexpr):
    """As `draw`, adding up from the likeliest down (the lower id first among equals), still without sorting.

    The token is where the weight of all that is at least as likely first exceeds `u` times the total: a threshold.
    """
    goal = (u * total.to(tl.float64)).to(tl.float32)
    key = largest_key(row, size, edge, goal, peak, inverse_temperature, True, True, BLOCK)
    above_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), size)
        above_B += tl.where(order_key(x) > key, weight_of(x, peak, inverse_temperature), 0.0)
    each = tl.exp((from_key(key) - peak) * inverse_temperature)
    rank = tl.maximum(((goal - tl.sum(above_B, 0)) / each).to(tl.int32), 0)
    token = -1
    seen = 0
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        equal = (order_key(load_logits(row, ids, size)) == key).to(tl.int32)
        before = seen + tl.cumsum(equal, 0) - 1
        # The last of the equals where rounding leaves a rank too high.
        found = tl.max(tl.where((equal == 1) & (before <= rank), ids, -1), 0)
        token = tl.maximum(token, found)
        seen += tl.sum(equal, 0)
    return token


@triton.jit
def sample(
    logits,  # [R, V]
    temperatures,  # f32 [R]; 0: greedy; below 0: the row is not sampled
    top_ks,  # i32 [R]; 0: all
    top_ps,  # f32 [R]
    min_ps,  # f32 [R]
    seeds,  # i64 [R]
    sequences,  # i32 [R]
    positions,  # i32 [R], of the token in the output
    tokens,  # i32 [R]; -1: the row is not sampled, or its logits are not finite; -2: more than MOST candidates are left
    size,  # V
    STREAM: tl.constexpr,
    MOST: tl.constexpr,  # 0: any number
    BLOCK: tl.constexpr,
):
    """Program (row): one token."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * size
    temperature = tl.load(temperatures + r)
    if temperature < 0.0:
        tl.store(tokens + r, -1)
        return
    if temperature == 0.0:
        tl.store(tokens + r, greedy(row, size, BLOCK))
        return
    top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
    peak, edge, ties, total, count = restrict(row, size, temperature, top_k, top_p, min_p, BLOCK)
    void = unrestricted(top_k, top_p, min_p)
    if (MOST > 0) & ((count > MOST) & (void == 0)):
        tl.store(tokens + r, tl.where(tl.abs(peak) < float("inf"), -2, -1))
        return
    u = uniform(tl.load(seeds + r), tl.load(sequences + r), tl.load(positions + r), STREAM)
    inverse_temperature = 1.0 / temperature
    if void:
        token = draw(row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK)
    else:
        token = draw_down(row, size, peak, edge, total, inverse_temperature, u, BLOCK)
    tl.store(tokens + r, tl.where(tl.abs(peak) < float("inf"), token, -1))
