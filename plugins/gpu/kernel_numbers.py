"""Number formats that several Triton kernels read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantized(stored, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """8-bit elements in units of their scale, or values, in the dtype that the products run in.

    FORMAT: fp8_e4m3 or fp8_e5m2 (u8 bits), the same with "_native" behind it (converted by the hardware, from SM89 on),
    or any other: a plain conversion of what is stored.
    """
    if FORMAT == "fp8_e4m3":
        # The bits as a half have the value / 2^8, denormals included: SM80 has no conversion of this format.
        bits = stored.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)
    if FORMAT == "fp8_e5m2":  # a half with less mantissa
        return (stored.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(dtype)
    if FORMAT == "fp8_e4m3_native":
        return stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    if FORMAT == "fp8_e5m2_native":
        return stored.to(tl.float8e5, bitcast=True).to(dtype)
    return stored.to(dtype)
