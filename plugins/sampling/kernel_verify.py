"""Speculative verification in Triton: which drafted tokens stay, and the token after them (Leviathan et al. 2023).

`restrict_rows` finds what each row may be sampled from, all rows side by side; `verify` then walks along each sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.sampling.kernel import (
    draw,
    draw_down,
    greedy,
    keep,
    load_logits,
    order_key,
    restrict,
    uniform,
    unrestricted,
    weight_of,
)


@triton.jit
def restrict_rows(
    logits,  # [R, V]
    temperatures,  # f32 [R], and so on
    top_ks,
    top_ps,
    min_ps,
    stats,  # f32 [R, 2]: peak and total
    edges,  # i64 [R, 3]: edge key, ties, and whether nothing restricts the row; of a greedy row the token
    size,
    BLOCK: tl.constexpr,
):
    """Program (row)."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * size
    temperature = tl.load(temperatures + r)
    if temperature == 0.0:
        tl.store(edges + 3 * r, greedy(row, size, BLOCK).to(tl.int64))
        return
    top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
    peak, edge, ties, total, _ = restrict(row, size, temperature, top_k, top_p, min_p, BLOCK)
    tl.store(stats + 2 * r, peak)
    tl.store(stats + 2 * r + 1, total)
    tl.store(edges + 3 * r, edge.to(tl.int64))
    tl.store(edges + 3 * r + 1, ties.to(tl.int64))
    tl.store(edges + 3 * r + 2, unrestricted(top_k, top_p, min_p).to(tl.int64))


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
def residual_weight(
    row, draft_row, size, start, peak, edge, ties, total, inverse_temperature, seen, BLOCK: tl.constexpr
):  # fmt: skip
    """max(p - q, 0) of a tile, and the ties seen so far."""
    ids = start + tl.arange(0, BLOCK)
    x = load_logits(row, ids, size)
    kept, seen = keep(order_key(x), edge, ties, seen)
    p = tl.where(kept, weight_of(x, peak, inverse_temperature), 0.0) / total
    return tl.maximum(p - tl.load(draft_row + ids, mask=ids < size, other=0.0), 0.0), seen


@triton.jit
def verify(
    logits,  # [R, V]: a sequence with n drafted tokens has n + 1 rows
    row_starts,  # i32 [S + 1]
    draft_tokens,  # i32 [R - S], the sequences end to end
    draft_probs,  # f32 [R - S, V]; unused where CERTAIN
    temperatures,  # f32 [R]
    stats,
    edges,
    seeds,  # i64 [S]
    sequences,  # i32 [S]
    positions,  # i32 [S], of the first drafted token in the output
    accepted,  # i32 [S]
    tokens,  # i32 [S]: the one after the accepted ones; -1: logits that are not finite
    size,
    CERTAIN: tl.constexpr,
    TOKEN_STREAM: tl.constexpr,
    ACCEPT_STREAM: tl.constexpr,
    RESIDUAL_STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence). A drafted token stays if u q < p; the first that does not is drawn again from max(p - q, 0).

    CERTAIN (q is 1 for the drafted token): a token is drawn as without a draft; the drafted one stays if it is that.
    """
    s = tl.program_id(0)
    first = tl.load(row_starts + s)
    drafted = tl.load(row_starts + s + 1) - first - 1
    seed, sequence, position = tl.load(seeds + s), tl.load(sequences + s), tl.load(positions + s)
    count = 0
    walking = 1
    token = -1
    for i in range(drafted + 1):
        if walking == 1:
            r = first + i
            row = logits + r.to(tl.int64) * size
            temperature = tl.load(temperatures + r)
            edge_or_token, ties = tl.load(edges + 3 * r), tl.load(edges + 3 * r + 1).to(tl.int32)
            proposal = tl.load(draft_tokens + r - s, mask=i < drafted, other=-2)
            if temperature == 0.0:
                token = edge_or_token.to(tl.int32)
                walking = tl.where(token == proposal, 1, 0)
            else:
                peak, total = tl.load(stats + 2 * r), tl.load(stats + 2 * r + 1)
                edge = edge_or_token.to(tl.uint32)
                inverse_temperature = 1.0 / temperature
                kept = 0
                drawn = 1  # as without a draft
                if not CERTAIN:
                    drawn = tl.where(i == drafted, 1, 0)
                    if drawn == 0:
                        p = probability(row, size, proposal, peak, edge, ties, total, inverse_temperature, BLOCK)
                        draft_row = draft_probs + (r - s).to(tl.int64) * size
                        u = uniform(seed, sequence, position + i, ACCEPT_STREAM)
                        if u * tl.load(draft_row + proposal).to(tl.float64) < p.to(tl.float64):
                            kept = 1
                        else:
                            u = uniform(seed, sequence, position + i, RESIDUAL_STREAM)
                            token = _draw_residual(
                                row, draft_row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK
                            )
                if drawn == 1:
                    u = uniform(seed, sequence, position + i, TOKEN_STREAM)
                    if tl.load(edges + 3 * r + 2) == 1:
                        token = draw(row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK)
                    else:
                        token = draw_down(row, size, peak, edge, total, inverse_temperature, u, BLOCK)
                    kept = tl.where(token == proposal, 1, 0)
                walking = kept
                if not (tl.abs(peak) < float("inf")):
                    walking = 0
                    token = -1
            count += walking
    tl.store(accepted + s, count)
    tl.store(tokens + s, token)


@triton.jit
def _draw_residual(
    row, draft_row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK: tl.constexpr
):  # fmt: skip
    mass = u * 0.0
    seen = 0
    for start in range(0, size, BLOCK):
        weight, seen = residual_weight(
            row, draft_row, size, start, peak, edge, ties, total, inverse_temperature, seen, BLOCK
        )
        mass += tl.sum(weight.to(tl.float64), 0)
    goal = u * mass
    before = goal * 0
    token = -1
    last = -1
    seen = 0
    for start in range(0, size, BLOCK):
        if token < 0:
            ids = start + tl.arange(0, BLOCK)
            weight, seen = residual_weight(
                row, draft_row, size, start, peak, edge, ties, total, inverse_temperature, seen, BLOCK
            )
            weight = weight.to(tl.float64)
            cumulative = before + tl.cumsum(weight, 0)
            place = tl.min(tl.where((cumulative > goal) & (weight > 0), ids, 2147483647), 0)
            final = tl.max(tl.where(weight > 0, ids, -1), 0)
            last = tl.where(final >= 0, final, last)
            token = tl.where(place < 2147483647, place, token)
            before += tl.sum(weight, 0)
    token = tl.where(token >= 0, token, last)
    if token < 0:  # p and q are equal: rounding alone rejected
        token = draw(row, size, peak, edge, ties, total, inverse_temperature, u, BLOCK)
    return token
