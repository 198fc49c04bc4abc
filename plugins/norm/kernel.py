"""RMS normalization (Zhang and Sennrich 2019) in Triton, with the residual sum before it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,  # [T, WIDTH]
    residual,  # [T, WIDTH]; unused unless RESIDUAL
    weight,  # [WIDTH]
    y,  # [T, WIDTH]
    summed,  # [T, WIDTH], which may be `residual`: x + residual, where RESIDUAL
    EPSILON: tl.constexpr,
    WIDTH: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): `y = h / sqrt(mean(h^2) + epsilon) * weight` in f32, of `h = x + residual` in the stored dtype."""
    offset = tl.program_id(0).to(tl.int64) * WIDTH
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    h = tl.load(x + offset + d, mask=inside, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + offset + d, mask=inside, other=0.0)
        h = (h.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(summed + offset + d, h, mask=inside)
    h = h.to(tl.float32)
    factor = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + EPSILON)
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offset + d, h * factor * w, mask=inside)
