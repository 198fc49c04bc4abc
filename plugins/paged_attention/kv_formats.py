"""KV cache formats: how a token's key or value of one head is stored, and how the cells lie in a block.

A codec turns a head's vector `[D]` into a cell: data, and scales beside it that depend on this token alone, so that a
rollback or a copy never touches another cell. All arithmetic is f32 in a fixed order, so that kernels can be held to it
bit by bit. Scales are bfloat16, rounded up: the step grows by less than 1/128 and nothing else is lost.

| dtype              | codes                          | scales a token and head (bf16)                      |
|--------------------|--------------------------------|-----------------------------------------------------|
| f32, f16, bf16     | the value, saturated           | none                                                |
| int8               | -127..127                      | 1: largest magnitude / 127                          |
| fp8_e4m3, fp8_e5m2 | OCP FP8 (Micikevicius 2022)    | 1: largest magnitude / 448 or 57344; none if static |
| int4, zero_point   | 0..15, value = min + c * scale | a scale a group, then a minimum a group             |
| int4               | -8..7                          | a scale a group: the extreme value / -8             |

A **page** is one block of one head: u8 `[block_size * cell_bytes(D)]`, data first, scales after it:

    data    u8   [block_size, data_bytes(D)]     int4: byte j of a row holds element j (low) and j + D/2 (high nibble)
    scales  bf16 [scale_count(D), block_size]    the scales of a group lie side by side for all tokens of the block

A cache of pages is u8 `[num_blocks, num_kv_heads, block_size * cell_bytes]`; copying a block copies everything. The
C++ kernels keep the same bytes in another order (`cpu_layout.py`); f32, f16 and bf16 pages have no scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]

DTYPES = ("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
_BITS = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
# mantissa bits, smallest normal exponent
_FP8 = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}
# Scales below the smallest normal number are 0, and so is the cell: denormals are flushed by many kernels.
SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_INT4 = np.float32(2.0**126)
_NAN_BITS = np.uint16(0x7FC0)


@dataclass(frozen=True)
class KvFormat:
    """One format of keys or values.

    Attributes:
        dtype: one of `DTYPES`.
        group_size: int4: elements that share a scale (32 or 64; the last group of a head may be shorter).
        zero_point: int4: a minimum a group beside its scale.
        static_scale: fp8: one calibrated scale for every cell, which then stores none; 0: a scale a cell.
    """

    dtype: str
    group_size: int = 32
    zero_point: bool = True
    static_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"KV dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if self.dtype == "int4" and self.group_size not in (32, 64):
            raise ValueError(f"KV group size {self.group_size} is not allowed; 32 or 64")
        if self.static_scale and (self.dtype not in _FP8 or not 0 < self.static_scale < np.inf):
            raise ValueError(f"static scale {self.static_scale} of {self.dtype}: fp8 alone takes one, above zero")

    @property
    def packed(self) -> bool:
        """Whether cells hold codes with scales, rather than the values themselves."""
        return self.dtype not in ("f32", "f16", "bf16")

    def groups(self, head_size: int) -> int:
        """Groups of elements that share a scale."""
        return -(-head_size // self.group_size) if self.dtype == "int4" else 1

    def data_bytes(self, head_size: int) -> int:
        """Bytes of a cell's codes. Raises `ValueError` where int4 meets an odd head size."""
        if self.dtype == "int4" and head_size % 2:
            raise ValueError(f"int4 takes an even head size, not {head_size}")
        return head_size * _BITS[self.dtype] // 8

    def scale_count(self, head_size: int) -> int:
        """bf16 numbers beside a cell's codes."""
        if not self.packed or self.static_scale:
            return 0
        return self.groups(head_size) * (1 + (self.dtype == "int4" and self.zero_point))

    def scale_bytes(self, head_size: int) -> int:
        return 2 * self.scale_count(head_size)

    def cell_bytes(self, head_size: int) -> int:
        """Bytes of one token of one head, scales included."""
        return self.data_bytes(head_size) + self.scale_bytes(head_size)

    # Codes --------------------------------------------------------------------------------------------------------

    def encode(self, x: F32, *, poison: bool = False) -> tuple[NDArray, NDArray[np.uint16]]:
        """Codes and scales of vectors.

        Args:
            x: f32 [..., D].
            poison: keep a vector with NaN or infinity as codes 0 with NaN for scales, as the kernels do: it then turns
                the result of whoever attends to it into NaN. Without it such a vector is refused.

        Returns:
            codes [..., D] (f32, f16, u16 for bf16, i8 for int8 and int4 without a zero point, u8 for int4 with one and
            for fp8), and scales as bf16 bits u16 [..., scale_count(D)].

        Raises:
            ValueError: NaN or infinity in `x`, unless `poison`.
        """
        x = np.asarray(x, np.float32)
        finite = np.isfinite(x).all(axis=-1, keepdims=True)
        if not poison and not finite.all():
            raise ValueError(f"a {self.dtype} KV cell cannot hold NaN or infinity")
        none = np.zeros((*x.shape[:-1], 0), np.uint16)
        if self.dtype == "f32":
            return x.copy(), none
        if self.dtype == "f16":
            return np.clip(x, -65504, 65504).astype(np.float16), none
        if self.dtype == "bf16":
            return bf16_bits(x), none
        x = np.where(finite, x, np.float32(0))
        if self.dtype == "int4":
            codes, scales = self._encode_int4(x)
        else:
            largest = np.float32(LARGEST[self.dtype])
            if self.static_scale:
                scale, scales = np.float32(self.static_scale), none
                inverse = np.float32(1) / scale
            else:
                scales = scale_bits(np.abs(x).max(axis=-1, keepdims=True) / largest)
                inverse = _inverse(bf16_values(scales))
            with np.errstate(over="ignore"):
                scaled = np.clip(x * inverse, -largest, largest)
            codes = np.rint(scaled).astype(np.int8) if self.dtype == "int8" else fp8_bits(scaled, self.dtype)
        if scales.shape[-1]:
            scales = np.where(finite, scales, _NAN_BITS)
        elif not finite.all():  # a static scale: the codes themselves say NaN
            codes = np.where(finite, codes, np.uint8(0x7F))
        return codes, scales

    def _encode_int4(self, x: F32) -> tuple[NDArray, NDArray[np.uint16]]:
        size, groups = x.shape[-1], self.groups(x.shape[-1])
        x = np.clip(x, -_LARGEST_INT4, _LARGEST_INT4)  # so that no span overflows
        codes, scales, minima = [], [], []
        for g in range(groups):
            part = x[..., g * self.group_size : min(size, (g + 1) * self.group_size)]
            if self.zero_point:
                low = bf16_bits_down(part.min(axis=-1, keepdims=True))
                span = part.max(axis=-1, keepdims=True) - bf16_values(low)
                scale = scale_bits((span / np.float32(15)).astype(np.float32))
                shifted = (part - bf16_values(low)) * _inverse(bf16_values(scale))
                codes.append(np.clip(np.rint(shifted), 0, 15).astype(np.uint8))
                minima.append(low)
            else:
                extreme = np.take_along_axis(part, np.abs(part).argmax(axis=-1, keepdims=True), axis=-1)
                magnitude = scale_bits((np.abs(extreme) / np.float32(8)).astype(np.float32))
                scale = np.where(extreme > 0, magnitude | np.uint16(0x8000), magnitude)  # the extreme is code -8
                scale = np.where(magnitude == 0, np.uint16(0), scale)
                codes.append(np.clip(np.rint(part * _inverse(bf16_values(scale))), -8, 7).astype(np.int8))
            scales.append(scale)
        return np.concatenate(codes, axis=-1), np.concatenate([*scales, *minima], axis=-1)

    def decode(self, codes: NDArray, scales: NDArray[np.uint16]) -> F32:
        """The inverse of `encode`, but for what rounding lost: f32 [..., D]."""
        if self.dtype in ("f32", "f16"):
            return codes.astype(np.float32)
        if self.dtype == "bf16":
            return bf16_values(codes)
        if self.dtype == "int4":
            size, groups = codes.shape[-1], self.groups(codes.shape[-1])
            values = bf16_values(scales)
            spread = np.repeat(values[..., :groups], self.group_size, axis=-1)[..., :size]
            product = codes.astype(np.float32) * spread
            if not self.zero_point:
                return product
            return product + np.repeat(values[..., groups:], self.group_size, axis=-1)[..., :size]
        values = codes.astype(np.float32) if self.dtype == "int8" else fp8_values(codes, self.dtype)
        return values * (np.float32(self.static_scale) if self.static_scale else bf16_values(scales))

    # Pages --------------------------------------------------------------------------------------------------------

    def empty_cache(self, num_blocks: int, num_heads: int, block_size: int, head_size: int) -> Bytes:
        """Zeroed pages u8 [num_blocks, num_heads, block_size * cell_bytes]."""
        return np.zeros((num_blocks, num_heads, block_size * self.cell_bytes(head_size)), np.uint8)

    def write(self, cache: Bytes, blocks: NDArray, cells: NDArray, x: F32, block_size: int) -> None:
        """Store `x` f32 [T, num_heads, D] in the pages `cache`: token i in the cell `cells[i]` of block `blocks[i]`.

        NaN and infinity poison their own cells (see `encode`).
        """
        size = x.shape[-1]
        codes, scales = self.encode(x, poison=True)
        data, numbers = self._areas(cache, block_size, size)
        data[blocks, :, cells] = self._to_bytes(codes)
        numbers[blocks, :, :, cells] = scales

    def read(self, cache: Bytes, blocks: NDArray, block_size: int, head_size: int) -> F32:
        """The values of whole blocks: f32 [len(blocks), num_heads, block_size, D]."""
        data, numbers = self._areas(cache, block_size, head_size)
        return self.decode(self._from_bytes(data[blocks], head_size), np.moveaxis(numbers[blocks], -2, -1))

    def _areas(self, cache: Bytes, block_size: int, head_size: int) -> tuple[Bytes, NDArray[np.uint16]]:
        """Views of the pages: data u8 [N, H, block_size, data_bytes], scales u16 [N, H, scale_count, block_size]."""
        blocks, heads, size = cache.shape
        expected = block_size * self.cell_bytes(head_size)
        if size != expected:
            raise ValueError(f"a {self.dtype} page has {expected} bytes, and the cache has pages of {size}")
        end = block_size * self.data_bytes(head_size)
        data = cache[..., :end].reshape(blocks, heads, block_size, -1)
        numbers = cache[..., end:].view(np.uint16).reshape(blocks, heads, self.scale_count(head_size), block_size)
        assert np.shares_memory(data, cache)
        return data, numbers

    def _to_bytes(self, codes: NDArray) -> Bytes:
        if self.dtype != "int4":
            return np.ascontiguousarray(codes).view(np.uint8)
        nibbles = codes.view(np.uint8) & 0xF
        half = codes.shape[-1] // 2
        return (nibbles[..., :half] | (nibbles[..., half:] << 4)).astype(np.uint8)

    def _from_bytes(self, data: Bytes, head_size: int) -> NDArray:
        if self.dtype == "int4":
            codes = np.concatenate([data & 0xF, data >> 4], axis=-1)
            return codes if self.zero_point else (codes.astype(np.int8) ^ 8) - 8
        kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8}.get(self.dtype, np.uint8)
        return np.ascontiguousarray(data).view(kind).reshape(*data.shape[:-1], head_size)


# Numbers ----------------------------------------------------------------------------------------------------------


def bf16_bits(x: F32) -> NDArray[np.uint16]:
    """f32 -> bfloat16 bits, to nearest even, saturated at the largest finite number; NaN and infinity stay."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    overflown = ((rounded & 0x7FFF) == 0x7F80) & np.isfinite(x)
    rounded = np.where(overflown, (bits >> 16 & 0x8000) | 0x7F7F, rounded)
    special = np.where(np.isnan(x), _NAN_BITS, bits >> 16)
    return np.where(np.isfinite(x), rounded, special).astype(np.uint16)


def bf16_bits_down(x: F32) -> NDArray[np.uint16]:
    """f32 -> bfloat16 bits, towards minus infinity; numbers below the smallest normal one become 0 or its negative."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    negative = (bits >> 31).astype(bool)
    down = np.where(negative, (bits + np.uint32(0xFFFF)) >> 16, bits >> 16)
    tiny = np.abs(x) < SMALLEST_SCALE
    down = np.where(tiny, np.where(negative & (x != 0), np.uint32(0x8080), np.uint32(0)), down)
    return np.where((down & 0x7FFF) == 0x7F80, np.uint32(0xFF7F), down).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    """bfloat16 bits -> f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def scale_bits(scale: F32) -> NDArray[np.uint16]:
    """A scale >= 0 -> bfloat16 bits, rounded up; 0 below `SMALLEST_SCALE`."""
    bits = np.asarray(scale, np.float32).view(np.uint32)
    return np.where(scale < SMALLEST_SCALE, np.uint32(0), (bits + np.uint32(0xFFFF)) >> 16).astype(np.uint16)


def _inverse(scale: F32) -> F32:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def fp8_bits(x: F32, dtype: str) -> NDArray[np.uint8]:
    """Finite f32 within the format's range -> FP8 bits, to nearest even, denormals kept."""
    mantissa, lowest = _FP8[dtype]
    _, exponent = np.frexp(np.abs(x))
    exponent = np.where(x == 0, lowest, np.maximum(exponent - 1, lowest))  # of the leading bit
    units = np.rint(np.ldexp(np.abs(x), mantissa - exponent)).astype(np.int32)
    # A denormal has the exponent field 0 and a normal number its leading bit on top of it: the sum carries by itself.
    magnitude = ((exponent - lowest) << mantissa) + units
    return (magnitude | (np.signbit(x).astype(np.int32) << 7)).astype(np.uint8)


def fp8_values(bits: NDArray[np.uint8], dtype: str) -> F32:
    """FP8 bits -> f32. e5m2 has infinities and NaN, e4m3 has NaN alone."""
    return _fp8_table(dtype)[bits]


def _fp8_table(dtype: str) -> F32:
    mantissa, lowest = _FP8[dtype]
    magnitude = np.arange(128)
    field, fraction = magnitude >> mantissa, (magnitude & ((1 << mantissa) - 1)).astype(np.float64)
    value = np.where(field > 0, fraction + (1 << mantissa), fraction) * 2.0 ** (
        np.maximum(field, 1) - 1 + lowest - mantissa
    )
    if dtype == "fp8_e4m3":
        value[127] = np.nan
    else:
        value[124], value[125:] = np.inf, np.nan
    return np.concatenate([value, -value]).astype(np.float32)


# Rotation ---------------------------------------------------------------------------------------------------------


def rotate(x: NDArray[np.floating]) -> F32:
    """The orthonormal Walsh-Hadamard transform of the last axis, [..., D] -> f32 [..., D]; its own inverse.

    It spreads an outlier over its whole block (QuaRot, Ashkboos et al. 2024), and leaves dot products as they are.
    Blocks are as long as the largest power of two that divides D.
    """
    size = x.shape[-1]
    block = size & -size
    y = np.asarray(x, np.float32).reshape(x.size // block, block).copy()
    step = 1
    while step < block:
        pairs = y.reshape(len(y), block // (2 * step), 2, step)
        first, second = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = first + second, first - second
        step *= 2
    return (y * np.float32(block**-0.5)).reshape(x.shape)
