"""`plancast::Linear`: `y = x W^T (+ bias)` with int8, int4 or bf16 weights, packed for the kernels.

A weight is bf16, or int8 (`w = scale * q`) or int4 (`w = scale * (q - 8)`, q in 0..15) with a scale a channel or a
group of 32, 64, 128, ... columns. Beside each scale may stand a minimum (`w = scale * q + min` with unsigned q, as in
GGUF's Q4_1) or a zero point (`w = scale * (q - zero)`). Scales (and minima) that are all exact in f16 are kept in f16:
a quantizer that rounds its scales to f16 before it rounds the weights saves 5 to 10 % of memory and time.

Activations are rounded inside, row by row, as `activations` says:

- `int16`: to as many levels as a 32-bit sum holds (15 bits at 576 columns, 12 at 4,096), one scale a row. Costs no
  quality that can be measured (KL 2e-5 on SmolLM2-135M). int8 weights only.
- `int8`: to +-127, one scale for each 32 columns of a row. Twice as fast where sums are the limit (from 8 rows or so).
  KL 0.0026 on SmolLM2-135M for all products; see docs/cpu-kernels.md for the share of each.
- `bf16`, and `bf16x2` (the sum of two, 16 bits): for bf16 weights only.

Sums of integers are exact, and the few float operations after them happen in one order, so int8 and int4 products have
the same bits with every instruction set, any number of threads and any batch around a row. What bf16 products do to the
last bits is the hardware's choice, but they too are the same whatever the batch.

A row with NaN or infinity gives NaN, all along the row (int8 and int4 weights). Magnitudes below 2^-100 count as 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

DOMAIN = "plancast"
OP_TYPE = "Linear"
VERSION = 2
INPUTS = ("x", "packed_weight", "bias")
STRIP = 32  # output channels that lie side by side in the packed weight
BLOCK = 32  # columns that do
LEAST = np.float32(2.0**-100)

Kind = Literal["int8", "int4", "bf16"]
Low = Literal["none", "minimum", "zero"]
Activations = Literal["int8", "int16", "bf16", "bf16x2"]


class Weight(NamedTuple):
    """A weight [N, K] before it is packed.

    Attributes:
        kind: what `values` holds.
        values: int8: int8 [N, K] (with minima: uint8). int4: uint8 [N, K] within 0..15. bf16: the bits, uint16 [N, K].
        scale: f32 [N, groups] (bf16: None).
        minimum: f32 [N, groups], or None.
        zero: int8 [N, groups] (int8) or uint8 within 0..15 (int4), or None. Not together with `minimum`.
        group: columns that share a scale, a multiple of 32; 0: all of them.
    """

    kind: Kind
    values: NDArray
    scale: NDArray[np.float32] | None = None
    minimum: NDArray[np.float32] | None = None
    zero: NDArray | None = None
    group: int = 0

    @property
    def channels(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def low(self) -> Low:
        """What is added to `scale * q`."""
        return "minimum" if self.minimum is not None else "zero" if self.zero is not None else "none"

    @property
    def f16_scale(self) -> bool:
        """Whether scales and minima are all exact in f16, and kept so."""
        parts = [part for part in (self.scale, self.minimum) if part is not None]
        with np.errstate(over="ignore"):
            return bool(parts) and all((part.astype(np.float16) == part).all() for part in parts)


def activation_levels(in_features: int) -> int:
    """The largest int16 activation: `sum(a * w)` of int8 weights stays within 32 bits, and a's upper byte within 8."""
    return min(127 * 256 + 127, (2**31 - 1) // (128 * max(in_features, 1)))


def group_count(columns: int, group: int) -> int:
    """Groups of a row of `columns`."""
    return max(1, -(-columns // group)) if group else 1


def pack(weight: Weight) -> NDArray[np.uint8]:
    """`weight` as the kernels read it: uint8 [strips, bytes of a strip].

    A strip of 32 channels is a row of groups; a group is its scales [32], its minima [32] (in the scales' dtype) or
    zero points [32] (bytes; int8: + 128) where there are any, and blocks of 32 columns. A block holds, for int8, quads
    of columns [8, 32, 4] of q + 128 (unsigned q as it is); for int4 the same with the quads 4..7 in the upper nibbles
    of the quads 0..3; for bf16 pairs [16, 32, 2].

    Raises:
        ValueError: a shape, a group or values that no weight has.
    """
    _check(weight)
    channels, columns = weight.values.shape
    strips, blocks = -(-channels // STRIP), -(-columns // BLOCK)
    values = np.zeros((strips * STRIP, blocks * BLOCK), weight.values.dtype)
    values[:channels, :columns] = weight.values
    if weight.kind == "bf16":
        pairs = values.reshape(strips, STRIP, blocks, 16, 2).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(pairs).view(np.uint8).reshape(strips, -1)
    if values.dtype == np.int8:
        values = values.view(np.uint8) ^ np.uint8(128)
    quads = values.reshape(strips, STRIP, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    if weight.kind == "int4":
        quads = quads[:, :, :4] | quads[:, :, 4:] << np.uint8(4)
    body = quads.reshape(strips, blocks, -1)

    assert weight.scale is not None
    groups = weight.scale.shape[1]
    in_group = (weight.group or blocks * BLOCK) // BLOCK
    dtype = np.float16 if weight.f16_scale else np.float32
    parts = [_header(part, strips, dtype) for part in (weight.scale, weight.minimum) if part is not None]
    if weight.zero is not None:
        zero = weight.zero.view(np.uint8) ^ np.uint8(128) if weight.kind == "int8" else weight.zero
        parts.append(_header(zero, strips, np.uint8))
    whole = np.zeros((strips, groups * in_group, body.shape[2]), np.uint8)
    whole[:, :blocks] = body
    parts.append(whole.reshape(strips, groups, -1))
    header = sum(part.shape[2] for part in parts[:-1])
    # The last group may have fewer blocks.
    return np.concatenate(parts, axis=2).reshape(strips, -1)[:, : groups * header + blocks * body.shape[2]].copy()


def _header(part: NDArray, strips: int, dtype: type) -> NDArray[np.uint8]:
    """[N, groups] -> the bytes of [strips, groups, 32]."""
    padded = np.zeros((strips * STRIP, part.shape[1]), dtype)
    padded[: part.shape[0]] = part
    ordered = np.ascontiguousarray(padded.reshape(strips, STRIP, -1).transpose(0, 2, 1))
    return ordered.view(np.uint8).reshape(strips, part.shape[1], -1)


def _check(weight: Weight) -> None:
    signed = np.uint8 if weight.minimum is not None else np.int8
    expected = {"int8": signed, "int4": np.uint8, "bf16": np.uint16}[weight.kind]
    if weight.values.dtype != expected or weight.values.ndim != 2 or 0 in weight.values.shape:
        raise ValueError(
            f"{weight.kind} values must be {np.dtype(expected)} [N, K], not {weight.values.dtype} {weight.values.shape}"
        )
    if weight.group % BLOCK:
        raise ValueError(f"a group has a multiple of {BLOCK} columns, not {weight.group}")
    if weight.kind == "int4" and weight.values.max() > 15:
        raise ValueError(f"int4 values must be within 0..15, and one is {weight.values.max()}")
    if weight.kind == "bf16":
        return
    shape = (weight.channels, group_count(weight.columns, weight.group))
    for name, part in (("scale", weight.scale), ("minimum", weight.minimum), ("zero", weight.zero)):
        if part is not None and part.shape != shape:
            raise ValueError(f"{name} must be {shape}, not {part.shape}")
    if weight.scale is None or (weight.minimum is not None and weight.zero is not None):
        raise ValueError(f"{weight.kind} weights have scales, and beside them minima or zero points, not both")
    if weight.zero is not None and weight.zero.dtype != expected:
        raise ValueError(f"zero must be {np.dtype(expected)} as the values are, not {weight.zero.dtype}")
