"""A quantized weight as NumPy holds it, whatever format it came from: small integers (or fp8) and what they mean.

    w[n, order[j]] = scale[n, g] * (q[n, j] - zero[n, g]) + minimum[n, g],   g = j // group

All arithmetic is in f32, product first. `zero`, `minimum` and `order` may be absent. What maps exactly onto ONNX's
DequantizeLinear has no `minimum`; the formats that have one (GGUF's Q4_1, Q4_K, Q5_K) add it as a block-sum term.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Stored kinds: the NumPy dtype of `values`, and bits an element takes when packed. fp8 is e4m3fn, as its bits.
KINDS: dict[str, tuple[type, int]] = {
    "int8": (np.int8, 8),
    "uint8": (np.uint8, 8),
    "int4": (np.int8, 4),
    "uint4": (np.uint8, 4),
    "fp8": (np.uint8, 8),
}
RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What is known of a quantized weight without reading it. Equal formats lie side by side in one merged weight."""

    kind: str
    group: int  # columns that share a scale; all of them for a scale a channel
    zero: bool = False
    minimum: bool = False
    order: str | None = None  # digest of the permutation of columns

    @property
    def bits(self) -> float:
        """Bits that an element takes, with scales (f16), zero points and minima (f16)."""
        bits = KINDS[self.kind][1]
        return bits + (16 + (bits if self.zero else 0) + (16 if self.minimum else 0)) / self.group


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Values `[N, K]` (output channels, input columns), scales and zero points `[N, K / group]`, order `[K]`."""

    kind: str
    values: NDArray
    scale: NDArray[np.float32]
    zero: NDArray | None = None
    minimum: NDArray[np.float32] | None = None
    order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        dtype, _ = KINDS[self.kind]
        rows, columns = self.values.shape
        groups = self.scale.shape[1]
        assert self.values.dtype == dtype, (self.kind, self.values.dtype)
        assert self.scale.shape == (rows, groups), (self.values.shape, self.scale.shape)
        assert columns % groups == 0, (columns, groups)
        for extra in (self.zero, self.minimum):
            assert extra is None or extra.shape == self.scale.shape
        assert self.order is None or self.order.shape == (columns,)

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scale.shape[1]

    @property
    def format(self) -> WeightFormat:
        order = None if self.order is None else hashlib.sha256(self.order.astype("<i8").tobytes()).hexdigest()[:16]
        return WeightFormat(self.kind, self.group, self.zero is not None, self.minimum is not None, order)

    def numbers(self) -> NDArray[np.float32]:
        """The stored values as f32 `[N, K]`, before scaling."""
        if self.kind == "fp8":
            import ml_dtypes

            return self.values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return self.values.astype(np.float32)

    def dequantize(self) -> NDArray[np.float32]:
        """The weight, f32 `[N, K]`, columns in the model's own order."""
        rows, columns = self.values.shape
        blocks = self.numbers().reshape(rows, -1, self.group)
        if self.zero is not None:
            blocks = blocks - self.zero.astype(np.float32)[:, :, None]
        blocks = blocks * self.scale[:, :, None]
        if self.minimum is not None:
            blocks = blocks + self.minimum[:, :, None]
        weight = blocks.reshape(rows, columns)
        if self.order is None:
            return weight
        restored = np.empty_like(weight)
        restored[:, self.order] = weight
        return restored

    def rows(self, index: NDArray[np.int64]) -> QuantizedWeight:
        """The output channels `index`, in that order."""
        return dataclasses.replace(
            self,
            values=self.values[index],
            scale=self.scale[index],
            zero=None if self.zero is None else self.zero[index],
            minimum=None if self.minimum is None else self.minimum[index],
        )

    def widened(self) -> QuantizedWeight:
        """The same weight in 8 bits: what nothing looks up in 4."""
        if self.kind not in ("int4", "uint4"):
            return self
        return dataclasses.replace(self, kind="int8" if self.kind == "int4" else "uint8")


@dataclass(frozen=True, slots=True)
class QuantizedRef:
    """A quantized weight that is not read yet: its format, its shape `[N, K]`, and what reads or computes it."""

    format: WeightFormat
    shape: tuple[int, int]
    load: Callable[[], QuantizedWeight]


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one format, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.format == first.format for part in parts)

    def stacked(name: str) -> NDArray | None:
        pieces = [getattr(part, name) for part in parts]
        return None if pieces[0] is None else np.concatenate(pieces)

    return dataclasses.replace(first, **{name: stacked(name) for name in ("values", "scale", "zero", "minimum")})


def pack4(values: NDArray) -> NDArray:
    """4-bit values `[..., K]`, K even -> bytes `[..., K / 2]`, the first of a pair in the low half."""
    low = values[..., 0::2].astype(np.uint8) & 15
    return low | ((values[..., 1::2].astype(np.uint8) & 15) << 4)


def unpack4(packed: NDArray[np.uint8], *, signed: bool) -> NDArray:
    """The inverse of `pack4`: int8 `[..., K]` where `signed`, else uint8."""
    values = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return ((values.astype(np.int8) ^ 8) - 8).astype(np.int8) if signed else values
