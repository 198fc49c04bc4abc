"""Passes over one row of logits f32 [V], each a few NumPy calls that stay in the L2 cache.

A row is looked at as a matrix of `CHUNK` rows: its columns are chunks of the vocabulary, and a sum or a maximum over
them is a run of vector instructions. Chunk maxima bound the k-th largest logit from below without sorting; chunk sums
make a two-level inverse CDF. Every result depends on the row alone, never on the batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

CHUNK = 64
# exp(x) of float32 is safe unshifted where the maximum is within these: no overflow in a sum of 2^20, no flush to zero.
_SAFE_MAX, _SAFE_MIN = 70.0, -40.0


class ChunkedExp:
    """exp((row - shift) / temperature) of a row, in a scratch buffer, with its chunk sums."""

    def __init__(self, vocab_size: int):
        self.columns = -(-vocab_size // CHUNK)
        self._vocab_size = vocab_size
        # Padding beyond the vocabulary stays zero: no probability.
        self._flat = np.zeros(CHUNK * self.columns, np.float32)
        self.values = self._flat[:vocab_size]
        self._matrix = self._flat.reshape(CHUNK, self.columns)

    def fill(self, row: NDArray[np.float32], row_max: float, temperature: float) -> tuple[NDArray[np.float32], float]:
        """Fill `values` with exp(row / temperature - shift), and return the chunk sums f32 [columns] and the shift."""
        out, peak, shift = self.values, row_max / temperature, 0.0
        if _SAFE_MIN < peak < _SAFE_MAX:
            if temperature == 1.0:
                np.exp(row, out=out)
            else:
                np.multiply(row, np.float32(1.0 / temperature), out=out)
                np.exp(out, out=out)
        else:
            # The division cannot make a NaN where a factor 1 / temperature that overflowed would.
            shift = peak
            np.subtract(row, np.float32(row_max), out=out)
            np.divide(out, np.float32(temperature), out=out)
            np.exp(out, out=out)
        return np.add.reduce(self._matrix, axis=0), shift

    def log_sum(self, row: NDArray[np.float32]) -> float:
        """log(sum(exp(row)))."""
        sums, shift = self.fill(row, float(row.max()), 1.0)
        return math.log(float(sums.sum(dtype=np.float64))) + shift

    def pick(self, sums: NDArray[np.float32], u: float) -> int:
        """The token at `u` in [0, 1) of the cumulative distribution (by chunk, then within it)."""
        cumulative = sums.cumsum(dtype=np.float64)
        column = search_cdf(cumulative, u)
        # What is left of `u`, as a share of the chunk: its f32 sum here and the f64 one below differ by rounding.
        before = float(cumulative[column - 1]) if column else 0.0
        share = (u * float(cumulative[-1]) - before) / (float(cumulative[column]) - before)
        inside = self._matrix[:, column].cumsum(dtype=np.float64)
        return search_cdf(inside, share) * self.columns + column


def search_cdf(cumulative: NDArray[np.float64], u: float) -> int:
    """The first index whose cumulative weight exceeds `u` (in [0, 1)) times the total: never one without weight."""
    total = float(cumulative[-1])
    return int(cumulative.searchsorted(min(u * total, math.nextafter(total, 0.0)), side="right"))


def chunk_maxima(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest logit of each chunk f32 [V // CHUNK]; what does not fill a line of the matrix is one chunk more."""
    columns = row.size // CHUNK
    if columns == 0:
        return row.copy()
    whole = CHUNK * columns
    maxima = np.maximum.reduce(row[:whole].reshape(CHUNK, columns), axis=0)
    return maxima if whole == row.size else np.append(maxima, row[whole:].max())


def kth_bound(row: NDArray[np.float32], maxima: NDArray[np.float32], k: int) -> float:
    """A threshold that at least `k` logits reach, at or below the k-th largest; minus infinity for k >= V.

    The k largest chunk maxima are k logits, so the k-th largest logit is no less than the k-th largest of them.
    """
    if k >= row.size:
        return -math.inf
    values = (maxima if 2 * k <= maxima.size else row).copy()
    values.partition(values.size - k)
    return float(values[values.size - k])


def ids_from(row: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """Ids, ascending, of the logits >= `threshold`."""
    return (row >= threshold).nonzero()[0]


def top_ids(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the `k` largest logits, largest first, the lower id first among equals."""
    if k <= 0:
        return np.empty(0, np.int64)
    ids = ids_from(row, kth_bound(row, chunk_maxima(row), k))
    return ids[(-row[ids]).argsort(kind="stable")[:k]]
