"""`plancast::Linear`: `y = x W^T (+ bias)` with int8 weights, one scale an output channel.

Activations are quantized inside, row by row, to as many levels as a 32-bit sum can hold without overflow (15 bits at
576 columns, 12 at 4,096). All products and sums are integers, so the result is the same for every instruction set, any
number of threads and any batch around a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DOMAIN = "plancast"
OP_TYPE = "Linear"
VERSION = 1
INPUTS = ("x", "packed_weight", "scale", "bias")
STRIP = 32  # output channels that lie side by side in the packed weight


def activation_levels(in_features: int) -> int:
    """The largest quantized activation: |a| <= levels keeps `sum(a * w)` of int8 weights within 32 bits."""
    return min(32767, (2**31 - 1) // (128 * in_features))


def pack_weight(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """int8 [N, K] -> [ceil(N/32), ceil(K/2), 32, 2]: a strip of 32 channels, pairs of columns, padded with zeros."""
    channels, columns = weight.shape
    padded = np.zeros((-(-channels // STRIP) * STRIP, -(-columns // 2) * 2), np.int8)
    padded[:channels, :columns] = weight
    strips = padded.reshape(-1, STRIP, padded.shape[1] // 2, 2)
    return np.ascontiguousarray(strips.transpose(0, 2, 1, 3))


def unpack_weight(packed: NDArray[np.int8], out_features: int, in_features: int) -> NDArray[np.int8]:
    """The inverse of `pack_weight`: int8 [N, K]."""
    strips, pairs = packed.shape[:2]
    weight = packed.transpose(0, 2, 1, 3).reshape(strips * STRIP, pairs * 2)
    return np.ascontiguousarray(weight[:out_features, :in_features])
