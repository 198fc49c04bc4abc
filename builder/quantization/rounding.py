"""Round to nearest: a weight onto the grid of a scheme. The calibrated methods choose grids and values better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from zoo.quantized import QuantizedWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.quantization.scheme import Scheme

_FP8_MAX = 448.0  # of e4m3fn
_F16_SMALLEST, _F16_LARGEST = 2.0**-14, 65504.0


def quantize(weight: NDArray[np.floating], scheme: Scheme) -> QuantizedWeight:
    """`weight` `[N, K]` in the scheme's format, each value rounded to the nearest (ties to even)."""
    blocks = grouped(weight.astype(np.float32), scheme)
    scale, zero = grid(blocks, scheme)
    return place(blocks, scale, zero, scheme)


def grouped(weight: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float32]:
    """`[N, K]` -> `[N, G, group]`."""
    return weight.reshape(weight.shape[0], -1, scheme.group or weight.shape[1])


def grid(
    blocks: NDArray[np.float32], scheme: Scheme, shrink: float | NDArray[np.float32] = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Scale and zero point (as f32, whole numbers; None if symmetric) of each group of `[..., G, group]`: `[..., G]`.

    `shrink` narrows the range, so that the largest values saturate and the others get a finer grid.

    Symmetric int8: largest magnitude / 127, so that negation is exact. Symmetric int4: -8 to 7, and
    nothing saturates. Scales of groups are f16 numbers, so that kernels may store them so.
    """
    if not scheme.symmetric:
        top = 15 if scheme.dtype == "int4" else 255
        low = np.minimum(blocks.min(-1), 0) * shrink
        high = np.maximum(blocks.max(-1), 0) * shrink
        scale = _storable((high - low) / np.float32(top), scheme)
        zero = np.clip(np.rint(-low / scale), 0, top).astype(np.float32)
        return scale, zero
    if scheme.dtype == "int4":
        needed = np.maximum(-blocks.min(-1) / np.float32(8), blocks.max(-1) / np.float32(7)) * shrink
        return _storable(needed.astype(np.float32), scheme), None
    magnitude = np.abs(blocks).max(-1) * shrink
    levels = np.float32(127 if scheme.dtype == "int8" else _FP8_MAX)
    return _storable((magnitude / levels).astype(np.float32), scheme), None


def place(
    blocks: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32] | None,
    scheme: Scheme,
) -> QuantizedWeight:
    """The values of `[N, G, group]` on a grid, as a `QuantizedWeight`."""
    rows = blocks.shape[0]
    numbers = nearest(blocks, scale[..., None], None if zero is None else zero[..., None], scheme)
    return stored(numbers.reshape(rows, -1), scale, zero, scheme)


def nearest(
    values: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32] | None,
    scheme: Scheme,
) -> NDArray[np.float32]:
    """The nearest stored numbers, as f32 (before scaling); the arguments broadcast."""
    scaled = values / scale
    if scheme.dtype == "fp8":
        clipped = np.clip(scaled, -_FP8_MAX, _FP8_MAX)
        return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if zero is not None:
        return np.clip(np.rint(scaled) + zero, 0, 15 if scheme.dtype == "int4" else 255)
    low, high = (-8, 7) if scheme.dtype == "int4" else (-127, 127)
    return np.clip(np.rint(scaled), low, high)


def stored(
    numbers: NDArray[np.float32], scale: NDArray[np.float32], zero: NDArray[np.float32] | None, scheme: Scheme
) -> QuantizedWeight:
    """Numbers `[N, K]`, scale and zero `[N, G]` in the dtypes of the scheme's format."""
    if scheme.dtype == "fp8":
        return QuantizedWeight("fp8", numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale)
    dtype = np.int8 if scheme.symmetric else np.uint8
    return QuantizedWeight(scheme.kind, numbers.astype(dtype), scale, None if zero is None else zero.astype(dtype))


def restored(
    numbers: NDArray[np.float32], scale: NDArray[np.float32], zero: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """What numbers stand for; the arguments broadcast."""
    return (numbers if zero is None else numbers - zero) * scale


def _storable(scale: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float32]:
    """No zero or denormal scale (a denormal has no digits left to be a unit of anything); 1 for a group of zeros.

    A group's scale is rounded to f16 where it lies in f16's normal range; a channel's stays f32.
    """
    scale = np.where(scale > 0, np.maximum(scale, np.finfo(np.float32).tiny), np.float32(1)).astype(np.float32)
    if scheme.group is None:
        return scale
    fits = (scale >= _F16_SMALLEST) & (scale <= _F16_LARGEST)
    return np.where(fits, scale.astype(np.float16).astype(np.float32), scale)
