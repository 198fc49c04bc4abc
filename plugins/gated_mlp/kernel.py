"""The gate of an MLP in Triton: `activation(gate) * up` of a merged product (SwiGLU and GeGLU, Shazeer 2020)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(
    gate_up,  # [T, 2 * width]: gate, then up
    y,  # [T, width]
    width,
    ACTIVATION: tl.constexpr,  # silu | gelu_tanh
    BLOCK: tl.constexpr,
):
    """Program (row, part of the width)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(gate_up + row * 2 * width + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + d, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    else:  # 0.5 x (1 + tanh z) is x sigmoid(2 z)
        active = gate * tl.sigmoid(gate * (1.0 + gate * gate * 0.044715) * 1.5957691216057308)
    tl.store(y + row * width + d, active * up, mask=inside)
