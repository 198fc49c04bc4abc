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
# A sum of exp outside of these may have lost digits to overflow or underflow: then the maximum is taken off first.
_SMALLEST_SUM, _LARGEST_SUM = 1e-15, 1e37
_LOG2_E = 1.0 / math.log(2.0)


class ChunkedExp:
    """exp(row / temperature - shift) of a row, in a scratch buffer, with its chunk sums."""

    def __init__(self, vocab_size: int):
        self.columns = -(-vocab_size // CHUNK)
        # Padding beyond the vocabulary stays zero: no probability.
        self._flat = np.zeros(CHUNK * self.columns, np.float32)
        self.values = self._flat[:vocab_size]
        self._matrix = self._flat.reshape(CHUNK, self.columns)
        self.sums = np.zeros(self.columns, np.float32)
        self.total = 0.0
        self.shift = 0.0

    def fill(self, row: NDArray[np.float32], temperature: float) -> bool:
        """Set `values` f32 [V], `sums` f32 [columns] over chunks, their f64 `total`, and `shift`.

        False where the row has no finite maximum: then nothing can be sampled from it. `temperature` <= 1e30.
        Values are right to 4e-6: exp as 2^(x log2 e), whose vector instructions take half the time of exp's.
        """
        self.shift = 0.0
        # Most rows need no shift, and so no maximum. What overflows is done again with it.
        with np.errstate(over="ignore", invalid="ignore"):
            self._exp2(np.multiply(row, np.float32(_LOG2_E / temperature), out=self.values))
        if _SMALLEST_SUM < self.total < _LARGEST_SUM:
            return True
        row_max = float(row.max())
        if not math.isfinite(row_max):
            return False
        self.shift = row_max / temperature
        np.subtract(row, np.float32(row_max), out=self.values)
        # A product with log2 e / temperature would be NaN where that overflows.
        self._exp2(np.divide(self.values, np.float32(temperature / _LOG2_E), out=self.values))
        return True

    def _exp2(self, scaled: NDArray[np.float32]) -> None:
        np.exp2(scaled, out=self.values)
        np.add.reduce(self._matrix, axis=0, out=self.sums)
        self.total = float(self.sums.sum(dtype=np.float64))

    def log_sum(self, row: NDArray[np.float32]) -> float:
        """log(sum(exp(row))); NaN where the row has no finite maximum."""
        return math.log(self.total) + self.shift if self.fill(row, 1.0) else math.nan

    def pick(self, u: float) -> int:
        """The token at `u` in [0, 1) of the cumulative distribution (by chunk, then within it)."""
        cumulative = self.sums.cumsum(dtype=np.float64)
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
    values = maxima.copy() if 2 * k <= maxima.size else row[row >= maxima.min()]
    if values.size < k:
        values = row.copy()
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
