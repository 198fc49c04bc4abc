"""Rows with few candidates, finished together: one pass of NumPy calls for all of them in place of one for each.

A row's result does not depend on its neighbours: rows are padded with minus infinity, sums run along a row in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.selection import Candidates, Restriction, keep_typical

# A row with more candidates is finished alone.
MAX_CANDIDATES = 128
_LOW = np.uint64(0xFFFFFFFF)
_SIGN = np.uint32(0x80000000)


@dataclass(slots=True)
class NarrowRow:
    """One row's candidates, its restriction, and the uniform number that picks from it."""

    found: Candidates
    restriction: Restriction
    uniform: float


def draw(rows: Sequence[NarrowRow]) -> list[int]:
    """The token of each row. The same set as `selection.select`, ordered from the likeliest down."""
    G, K = len(rows), max(row.found.ids.size for row in rows)
    values_GK = np.full((G, K), -np.inf, np.float32)
    for i, row in enumerate(rows):
        values_GK[i, : row.found.values.size] = row.found.values
    position_GK = _descending(values_GK)
    values_GK = np.take_along_axis(values_GK, position_GK, axis=1)
    each = np.arange(G)

    row_max, temperature, top_p, lowest, uniform = np.array(
        [
            (
                row.found.row_max,
                row.restriction.temperature,
                row.restriction.top_p,
                row.restriction.lowest(row.found.row_max),
                row.uniform,
            )
            for row in rows
        ]
    ).T
    weights_GK = np.exp((values_GK.astype(np.float64) - row_max[:, None]) / temperature[:, None])
    kth = np.array([min(row.restriction.top_k or K, K) for row in rows]) - 1
    # f32 against f32, as in `select`
    bound = np.maximum(values_GK[each, kth], lowest.astype(np.float32))
    weights_GK[values_GK < bound[:, None]] = 0.0

    cumulative_GK = np.cumsum(weights_GK, axis=1)
    mass = top_p * cumulative_GK[:, -1]
    for i, row in enumerate(rows):
        if row.found.mass is not None:
            mass[i] = row.found.mass
    last = np.minimum((cumulative_GK < mass[:, None]).sum(axis=1), K - 1)
    for i, row in enumerate(rows):
        if row.restriction.typical_p < 1.0:
            kept = np.zeros(K)
            typical = keep_typical(weights_GK[i, : last[i] + 1], row.restriction.typical_p)
            kept[typical] = weights_GK[i, typical]
            cumulative_GK[i] = np.cumsum(kept)
    total = cumulative_GK[each, last]
    target = np.minimum(uniform * total, np.nextafter(total, 0.0))
    choice = position_GK[each, (cumulative_GK <= target[:, None]).sum(axis=1)]
    return [int(row.found.ids[c]) for row, c in zip(rows, choice, strict=True)]


def _descending(values_GK: NDArray[np.float32]) -> NDArray[np.int64]:
    """For each row, the positions from the largest value down, the lower position first among equals.

    Value and position are packed into one integer, whose sort is several times faster than a stable argsort.
    """
    bits = (values_GK + np.float32(0.0)).view(np.uint32)  # + 0: no negative zero
    descending = np.where(bits & _SIGN, bits, ~(bits | _SIGN))
    keys = (descending.astype(np.uint64) << np.uint64(32)) | np.arange(values_GK.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    return (keys & _LOW).astype(np.int64)
