"""Weights of every format, and activations with every kind of row, for the tests of the products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.linear.op import Activations, Low, Weight, group_count

# kind, group, what is added, activations
FORMATS: list[tuple[str, int, Low, Activations]] = [
    ("int8", 0, "none", "int16"),
    ("int8", 32, "none", "int16"),
    ("int8", 128, "none", "int16"),
    ("int8", 0, "none", "int8"),
    ("int8", 32, "none", "int8"),
    ("int4", 0, "none", "int8"),
    ("int4", 32, "none", "int8"),
    ("int4", 64, "none", "int8"),
    ("int4", 128, "minimum", "int8"),
    ("int4", 32, "minimum", "int8"),
    ("int4", 0, "minimum", "int8"),
    ("int4", 32, "zero", "int8"),
    ("int4", 0, "zero", "int8"),
    ("int8", 64, "zero", "int8"),
    ("int8", 32, "minimum", "int8"),
    ("bf16", 0, "none", "bf16"),
    ("bf16", 0, "none", "bf16x2"),
]
# (output channels, columns): whole strips, odd tails of both, one column, one channel, deep sums.
SHAPES = [(64, 64), (33, 7), (1, 1), (31, 34), (96, 577), (40, 4096)]


def make_weight(
    kind: str, channels: int, columns: int, group: int, *, low: Low = "none", exact_f16: bool = True, seed: int = 0
) -> Weight:
    """A random weight of a format; scales and minima that are exact in f16, or not."""
    rng = np.random.default_rng([seed, channels, columns, group])
    if kind == "bf16":
        values = rng.standard_normal((channels, columns)).astype(np.float32).view(np.uint32) >> 16
        return Weight("bf16", values.astype(np.uint16))
    shape = (channels, group_count(columns, group))
    scale = (rng.random(shape) * 0.01 + 1e-4).astype(np.float16 if exact_f16 else np.float32).astype(np.float32)
    minimum = zero = None
    if low == "minimum":
        minimum = (-rng.random(shape) * 0.1).astype(np.float16 if exact_f16 else np.float32).astype(np.float32)
    if kind == "int8":
        values = rng.integers(-128, 128, (channels, columns), dtype=np.int8)
        values = values.view(np.uint8) if low == "minimum" else values
        zero = rng.integers(-128, 128, shape, dtype=np.int8) if low == "zero" else None
    else:
        values = rng.integers(0, 16, (channels, columns), dtype=np.uint8)
        zero = rng.integers(0, 16, shape, dtype=np.uint8) if low == "zero" else None
    return Weight(kind, values, scale, minimum, zero, group)


def make_x(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Activations [rows, columns] of every magnitude; from 5 rows on, one of zeros, a NaN, an infinity, a denormal."""
    rng = np.random.default_rng([seed, rows, columns])
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-28, 30, (rows, 1)).astype(np.float32)
    if rows > 4:
        x[1] = 0
        x[2, columns // 2] = np.nan
        x[3, 0] = -np.inf
        x[4] = np.float32(1e-42)
    return x
