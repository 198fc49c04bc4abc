"""Speculative verification in Triton: drafted tokens that were drawn at random stay, or are replaced (Leviathan et al.
2023). Drafts that are certain need no kernel of their own: `kernel.sample` draws at each of their rows.

All rows side by side: whether a row's draft stays does not hang on the rows before it, only whether anybody asks. What
a draft was drawn from comes as its tokens and their probabilities, mostly few, and is looked up by bisection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.sampling.kernel import keep, load_logits, order_key, restrict, uniform, weight_of


@triton.jit
def verify(
    logits,  # [R, V]
    drafted_rows,  # i32 [D]: rows of `logits`
    drafted_tokens,  # i32 [D]
    drafted_temperatures,  # f32 [D], above 0
    draft_starts,  # i32 [D + 1]
    draft_ids,  # i32 [N]: what the tokens were drawn from, ascending ids in each draft
    draft_probs,  # f32 [N]
    top_ks,  # i32 [R], and so on, as `sample` takes them
    top_ps,
    min_ps,
    seeds,
    sequences,
    positions,
    tokens,  # i32 [R]; -1: logits that are not finite
    size,
    ACCEPT_STREAM: tl.constexpr,
    RESIDUAL_STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (draft): the drafted token if u q < p, else one from max(p - q, 0)."""
    d = tl.program_id(0)
    r = tl.load(drafted_rows + d)
    row = logits + r.to(tl.int64) * size
    temperature = tl.load(drafted_temperatures + d)
    top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
    peak, edge, ties, total, _ = restrict(row, size, temperature, top_k, top_p, min_p, BLOCK)
    inverse_temperature = 1.0 / temperature
    drafted = tl.load(drafted_tokens + d)
    first, last = tl.load(draft_starts + d), tl.load(draft_starts + d + 1)
    p = probability(row, size, drafted, peak, edge, ties, total, inverse_temperature, BLOCK)
    q = draft_probability(tl.full([1], 0, tl.int32) + drafted, draft_ids, draft_probs, first, last)
    seed, sequence, position = tl.load(seeds + r), tl.load(sequences + r), tl.load(positions + r)
    u = uniform(seed, sequence, position, ACCEPT_STREAM)
    token = drafted
    if not (u * tl.sum(q, 0).to(tl.float64) < p.to(tl.float64)):
        u = uniform(seed, sequence, position, RESIDUAL_STREAM)
        token = draw_residual(
            row, size, peak, edge, ties, total, inverse_temperature, draft_ids, draft_probs, first, last, u, BLOCK
        )
    tl.store(tokens + r, tl.where(tl.abs(peak) < float("inf"), token, -1))


@triton.jit
def probability(row, size, token, peak, edge, ties, total, inverse_temperature, BLOCK: tl.constexpr):
    """The probability f32 of one token."""
    found = 0.0
    seen = 0
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(row, ids, size)
        kept, seen = keep(order_key(x), edge, ties, seen)
        found += tl.sum(tl.where(kept & (ids == token), weight_of(x, peak, inverse_temperature), 0.0), 0)
    return found / total


@triton.jit
def draft_probability(ids, draft_ids, draft_probs, first, last):
    """What the draft at `first` to `last` gives each of `ids`: 0 to those that it does not name."""
    low = ids * 0 + first
    high = ids * 0 + last
    left = last - first
    while left > 0:  # what lies between `low` and `high` is no more
        middle = (low + high) // 2
        below = tl.load(draft_ids + middle, mask=low < high, other=2147483647) < ids
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
        left = left // 2
    there = low < last
    found = there & (tl.load(draft_ids + low, mask=there, other=-1) == ids)
    return tl.load(draft_probs + low, mask=found, other=0.0)


@triton.jit
def residual_weight(
    row, size, start, peak, edge, ties, total, inverse_temperature, draft_ids, draft_probs, first, last, seen,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """max(p - q, 0) f64 of a tile, and the ties seen so far."""
    ids = start + tl.arange(0, BLOCK)
    x = load_logits(row, ids, size)
    kept, seen = keep(order_key(x), edge, ties, seen)
    p = tl.where(kept, weight_of(x, peak, inverse_temperature), 0.0) / total
    q = draft_probability(ids, draft_ids, draft_probs, first, last)
    return tl.maximum(p - q, 0.0).to(tl.float64), seen


@triton.jit
def draw_residual(
    row, size, peak, edge, ties, total, inverse_temperature, draft_ids, draft_probs, first, last, u,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at `u` times the mass of max(p - q, 0), added up by id."""
    mass = u * 0.0
    seen = 0
    for start in range(0, size, BLOCK):
        weight, seen = residual_weight(
            row, size, start, peak, edge, ties, total, inverse_temperature, draft_ids, draft_probs, first, last, seen,
            BLOCK,
        )  # fmt: skip
        mass += tl.sum(weight, 0)
    # p and q are equal, and rounding alone has refused: the token comes from p, as from an empty draft.
    last = tl.where(mass > 0.0, last, first)
    goal = u * tl.where(mass > 0.0, mass, 1.0)
    before = goal * 0.0
    token = -1
    final = -1
    seen = 0
    for start in range(0, size, BLOCK):
        if token < 0:
            ids = start + tl.arange(0, BLOCK)
            weight, seen = residual_weight(
                row, size, start, peak, edge, ties, total, inverse_temperature, draft_ids, draft_probs, first, last,
                seen, BLOCK,
            )  # fmt: skip
            cumulative = before + tl.cumsum(weight, 0)
            place = tl.min(tl.where((cumulative > goal) & (weight > 0), ids, 2147483647), 0)
            final = tl.maximum(final, tl.max(tl.where(weight > 0, ids, -1), 0))
            token = tl.where(place < 2147483647, place, token)
            before += tl.sum(weight, 0)
    # The tiles may fall short of the mass by rounding: then it is the last that has any weight.
    return tl.where(token >= 0, token, final)
