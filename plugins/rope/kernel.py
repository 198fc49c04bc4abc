"""Rotary embedding (Su et al. 2021) in Triton: one head, as other kernels use it, and a whole step's heads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(head, d, cos, sin, SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements `d` of a head after rotary embedding of its first ROTARY elements, in the head's dtype.

    `cos` and `sin` point to the ROTARY / 2 values of the head's position. INTERLEAVED: pairs are neighbours (GPT-J),
    else element i pairs with i + ROTARY / 2 (NeoX).
    """
    own = tl.load(head + d, mask=d < SIZE, other=0.0)
    if ROTARY == 0:
        return own
    if INTERLEAVED:
        partner = d ^ 1
        angle = d // 2
        first = d % 2 == 0
    else:
        first = d < ROTARY // 2
        partner = tl.where(first, d + ROTARY // 2, d - ROTARY // 2)
        angle = d % (ROTARY // 2)
    turned = d < ROTARY
    other = tl.load(head + partner, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    result = own.to(tl.float32) * c + tl.where(first, -other, other) * s
    return result.to(own.dtype)


@triton.jit
def rope(
    x,  # [T, heads * SIZE]
    cos,  # [positions, ROTARY / 2]
    sin,
    positions,  # [T]
    y,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, head)."""
    row = tl.program_id(0)
    at = tl.load(positions + row).to(tl.int64) * (ROTARY // 2)
    offset = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * SIZE
    d = tl.arange(0, BLOCK)
    result = rotated(x + offset, d, cos + at, sin + at, SIZE, ROTARY, INTERLEAVED)
    tl.store(y + offset + d, result, mask=d < SIZE)
