"""Quantizing one head's vector into its cell, bit by bit as `kv_formats.py` does it; formats as in `kernel_cells.py`.

Compile without fused multiply-add (`enable_fp_fusion=False`): a fused product rounds once where the truth rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)


@triton.jit
def rint(x):
    """The nearest whole number of |x| < 2^22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_up(scale):
    """A scale >= 0 as bf16 bits, rounded up; 0 below the smallest normal number: i32."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(scale < _TINY, 0, (bits + 0xFFFF) >> 16)


@triton.jit
def rounded_down(x):
    """bf16 bits, towards minus infinity, never infinite; denormals become 0 or the smallest negative normal: i32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    down = tl.where(bits < 0, ((magnitude + 0xFFFF) >> 16) | 0x8000, magnitude >> 16)
    down = tl.where(tl.abs(x) < _TINY, tl.where(x < 0, 0x8080, 0), down)
    return tl.where((down & 0x7FFF) == 0x7F80, 0xFF7F, down)


@triton.jit
def to_bf16(x):
    """f32 -> bf16 to nearest even, saturated at the largest finite number; NaN and infinity stay."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F)
    rounded = tl.where(magnitude == 0x7F800000, 0x7F80, rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded | sign)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def from_bits(bits):
    """bf16 bits i32 -> f32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Finite f32 within the range -> FP8 bits i32, ties to even, denormals kept."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Added to this, a number is rounded to whole units of the smallest denormal.
    MAGIC: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    shifted = magnitude + MAGIC
    denormal = shifted.to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA) << 23)
    return tl.where(magnitude < 2.0 ** (1 - BIAS), denormal, normal) | sign


@triton.jit
def store_scale(scales, bits, good):
    """Write one bf16 number by its bits, NaN where the vector held what is not finite."""
    tl.store(scales, tl.where(good, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def store_cell(
    data,  # the page's data, in the cells' type (u8 for fp8 and int4)
    scales,  # the page's bf16 numbers
    cell,
    low,  # all elements; int4: the lower half
    high,  # int4: the higher half
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Quantize one head's elements and write them, with their scales. What lies past SIZE (or its half) is ignored."""
    d = tl.arange(0, BLOCK_D)
    if FORMAT == "float":
        kind: tl.constexpr = data.dtype.element_ty
        stored = low
        if kind == tl.float16:
            value = low.to(tl.float32)
            clipped = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
            stored = tl.where(value == value, clipped, value).to(kind)  # NaN stays
        elif kind == tl.bfloat16:
            stored = to_bf16(low.to(tl.float32))
        tl.store(data + cell * SIZE + d, stored.to(kind), mask=d < SIZE)
    elif FORMAT == "int4" or FORMAT == "int4z":
        low, high = low.to(tl.float32), high.to(tl.float32)
        _store_int4(data, scales, cell, low, high, BLOCK_SIZE, SIZE, FORMAT, GROUP, BLOCK_D)
    else:
        x = tl.where(d < SIZE, low.to(tl.float32), 0.0)
        finite_D = finite(x)
        good = tl.min(finite_D.to(tl.int32), 0) == 1
        x = tl.where(good, x, 0.0)
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else (448.0 if FORMAT == "fp8_e4m3" else 57344.0)
        if STATIC > 0:
            factor = 1.0 / STATIC
        else:
            bits = rounded_up(tl.div_rn(tl.max(tl.abs(x), 0), LARGEST))
            factor = inverse(from_bits(bits))
            store_scale(scales + cell, bits, good)
        scaled = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)
        if FORMAT == "int8":
            codes = rint(scaled).to(tl.int32)
        elif FORMAT == "fp8_e4m3":
            codes = fp8_bits(scaled, 3, 7)
        else:
            codes = fp8_bits(scaled, 2, 15)
        if STATIC > 0:
            codes = tl.where(good, codes, 0x7F)
        tl.store(data + cell * SIZE + d, codes.to(data.dtype.element_ty), mask=d < SIZE)


@triton.jit
def _store_int4(
    data,
    scales,
    cell,
    low,
    high,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    h = tl.arange(0, BLOCK_H)
    inside = h < HALF
    low = tl.where(inside, low, 0.0)
    high = tl.where(inside, high, 0.0)
    good = tl.min((finite(low) & finite(high)).to(tl.int32), 0) == 1
    low = tl.where(good, low, 0.0)
    high = tl.where(good, high, 0.0)
    group_low, group_high = h // GROUP, (h + HALF) // GROUP
    factor_low = tl.zeros([BLOCK_H], tl.float32)
    factor_high = factor_low
    base_low = factor_low
    base_high = factor_low
    infinity: tl.constexpr = float("inf")
    for g in tl.static_range(GROUPS):
        in_low = inside & (group_low == g)
        in_high = inside & (group_high == g)
        smallest = tl.minimum(tl.min(tl.where(in_low, low, infinity), 0), tl.min(tl.where(in_high, high, infinity), 0))
        largest = tl.maximum(tl.max(tl.where(in_low, low, -infinity), 0), tl.max(tl.where(in_high, high, -infinity), 0))
        if FORMAT == "int4z":
            low_bits = rounded_down(smallest)
            base = from_bits(low_bits)
            bits = rounded_up(tl.div_rn(largest - base, 15.0))
            store_scale(scales + (GROUPS + g) * BLOCK_SIZE + cell, low_bits, good)
            base_low = tl.where(in_low, base, base_low)
            base_high = tl.where(in_high, base, base_high)
            factor = inverse(from_bits(bits))
        else:
            # The element of largest magnitude, the first of several, has code -8: its sign goes into the scale.
            first_largest = tl.minimum(
                tl.min(tl.where(in_low & (low == largest), h, 65536), 0),
                tl.min(tl.where(in_high & (high == largest), h + HALF, 65536), 0),
            )
            first_smallest = tl.minimum(
                tl.min(tl.where(in_low & (low == smallest), h, 65536), 0),
                tl.min(tl.where(in_high & (high == smallest), h + HALF, 65536), 0),
            )
            positive = (largest > -smallest) | ((largest == -smallest) & (first_largest < first_smallest))
            magnitude = tl.maximum(largest, -smallest)
            bits = rounded_up(tl.div_rn(magnitude, 8.0))
            bits = tl.where((bits != 0) & positive & (magnitude > 0), bits | 0x8000, bits)
            factor = inverse(from_bits(bits))
        store_scale(scales + g * BLOCK_SIZE + cell, bits, good)
        factor_low = tl.where(in_low, factor, factor_low)
        factor_high = tl.where(in_high, factor, factor_high)
    SMALLEST: tl.constexpr = 0.0 if FORMAT == "int4z" else -8.0
    codes_low = tl.minimum(tl.maximum(rint((low - base_low) * factor_low), SMALLEST), SMALLEST + 15.0)
    codes_high = tl.minimum(tl.maximum(rint((high - base_high) * factor_high), SMALLEST), SMALLEST + 15.0)
    packed = (codes_low.to(tl.int32) & 0xF) | ((codes_high.to(tl.int32) & 0xF) << 4)
    tl.store(data + cell * HALF + h, packed.to(tl.uint8), mask=inside)
