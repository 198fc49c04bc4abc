"""Passes over one row of logits f32 [V], each a few NumPy calls that stay in the L2 cache.

A row is looked at as a matrix of `CHUNK` rows: its columns are chunks of the vocabulary, and a sum or a maximum over
them is a run of vector instructions. Chunk maxima bound the k-th largest logit from below without sorting; chunk sums
make a two-level inverse CDF. Every result depends on the row alone, never on the batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from plugins.sampling.native import RowPasses, row_kernels

CHUNK = 64
# Up to so many chunks it is cheaper to look into each than over the whole row.
_FEW_CHUNKS = 24
# A sum of exp outside of these may have lost digits to overflow or underflow: then the maximum is taken off first.
_SMALLEST_SUM, _LARGEST_SUM = 1e-15, 1e37
_LOG2_E = 1.0 / math.log(2.0)
# A token that is likelier than one part in so many of what top_p leaves out is likely to be kept.
_LIKELY = (32, 512)
# Bins of the histogram of weights, 128 a binade; those below the last are one.
_BINS = 8192
_NONE = np.empty(0, np.int64)


class ChunkedExp:
    """exp(row / temperature - shift) of a row, in a scratch buffer, with its chunk sums."""

    def __init__(self, vocab_size: int):
        self.columns = -(-vocab_size // CHUNK)
        # Padding beyond the vocabulary stays zero: no probability.
        self._flat = np.zeros(CHUNK * self.columns, np.float32)
        self.values = self._flat[:vocab_size]
        self._matrix = self._flat.reshape(CHUNK, self.columns)
        self.sums = np.zeros(self.columns, np.float32)
        kernels = row_kernels()
        self._passes = RowPasses(kernels, self.values, self.sums) if kernels is not None else None
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
            self._exp2(row, _LOG2_E / temperature)
        if _SMALLEST_SUM < self.total < _LARGEST_SUM:
            return True
        row_max = float(row.max())
        if not math.isfinite(row_max):
            return False
        self.shift = row_max / temperature
        np.subtract(row, np.float32(row_max), out=self.values)
        # A product with log2 e / temperature would be NaN where that overflows.
        self._exp2(np.divide(self.values, np.float32(temperature / _LOG2_E), out=self.values), 1.0)
        return True

    def _exp2(self, row: NDArray[np.float32], scale: float) -> None:
        if self._passes is not None:
            self.total = self._passes.exp2(row, scale)
            return
        np.exp2(np.multiply(row, np.float32(scale), out=self.values), out=self.values)
        np.add.reduce(self._matrix, axis=0, out=self.sums)
        self.total = float(self.sums.sum(dtype=np.float64))

    def nucleus(self, mass: float) -> NDArray[np.int64]:
        """Ids, ascending, of a superset, of few more, of the fewest largest values that reach `mass`."""
        if self._passes is not None:
            return self._passes.nucleus(self.total, mass)
        # Mostly a few tokens, each likelier than a small part of what is left out, make the mass; the sums of chunks
        # tell where they can be. 1e-4: these sums are f32.
        for parts in _LIKELY:
            ids = self._heavier((self.total - mass) / parts)
            if ids is not None and float(self.values[ids].sum(dtype=np.float64)) >= mass * (1 + 1e-4):
                return ids
        return heaviest(self.values, self.total, mass)

    def largest(self, row: NDArray[np.float32], k: int, drop: float = -math.inf) -> tuple[NDArray[np.int64], float]:
        """Ids, ascending, of a superset, of few more, of the `k` largest logits but for those below the largest plus
        `drop`; and the largest. No ids where that is not finite. What was filled stays."""
        if self._passes is not None and 0 < 2 * k <= self.columns:
            ids, row_max = self._passes.largest(row, k, drop)
        else:
            maxima = chunk_maxima(row)
            row_max = float(maxima.max())
            ids = ids_in_chunks(row, maxima, max(kth_bound(row, maxima, k), row_max + drop)) if k > 0 else _NONE
        return (ids, row_max) if math.isfinite(row_max) else (_NONE, row_max)

    def _heavier(self, least: float) -> NDArray[np.int64] | None:
        """Ids, ascending, of the values >= `least` (> 0). None where they may lie in too many chunks to be quick."""
        columns = (self.sums >= np.float32(least)).nonzero()[0]  # no value is above the sum of its chunk
        if not 0 < columns.size <= 4 * _FEW_CHUNKS:
            return None
        lines, places = (self._matrix[:, columns] >= np.float32(least)).nonzero()
        return lines * self.columns + columns[places]

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


def chunk_maxima(row: NDArray[np.float32], chunk: int = CHUNK) -> NDArray[np.float32]:
    """The largest logit of each chunk f32 [V // chunk]; what does not fill a line of the matrix is one chunk more."""
    columns = row.size // chunk
    if columns == 0:
        return row.copy()
    whole = chunk * columns
    maxima = np.maximum.reduce(row[:whole].reshape(chunk, columns), axis=0)
    return maxima if whole == row.size else np.append(maxima, row[whole:].max())


def kth_bound(row: NDArray[np.float32], maxima: NDArray[np.float32], k: int) -> float:
    """A threshold that at least `k` logits reach, at or below the k-th largest; minus infinity for k >= V.

    The k largest chunk maxima are k logits, so the k-th largest logit is no less than the k-th largest of them.
    """
    if k >= row.size:
        return -math.inf
    if 2 * k <= maxima.size:
        values = maxima.copy()
    else:  # smaller chunks, at least 2k of them
        values = chunk_maxima(row, max(1, row.size // (2 * k)))
    values.partition(values.size - k)
    return float(values[values.size - k])


def ids_in_chunks(row: NDArray[np.float32], maxima: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """`ids_from`, quicker where the chunks' `maxima` (`chunk_maxima`) say that few chunks hold any."""
    size = maxima.size
    if size * CHUNK != row.size or threshold == -math.inf:
        return ids_from(row, threshold)
    columns = (maxima >= threshold).nonzero()[0]
    if columns.size > _FEW_CHUNKS:
        return ids_from(row, threshold)
    lines, places = (row.reshape(CHUNK, size)[:, columns] >= threshold).nonzero()
    return lines * size + columns[places]


def ids_from(row: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """Ids, ascending, of the logits >= `threshold`."""
    return (row >= threshold).nonzero()[0]


class Likeliest:
    """The likeliest token of a row of logits, and how likely it is. Not thread-safe: it reuses its buffers."""

    def __init__(self) -> None:
        self._kernels = row_kernels()
        self._share = np.empty(1, np.float32)
        self._to_share = self._share.ctypes.data
        self._exp = np.empty(0, np.float32)
        # The last row and where it lies: to ask an array for its address takes as long as much of the rest.
        self._row: NDArray[np.float32] | None = None
        self._to_row = 0

    def __call__(self, row: NDArray[np.float32]) -> tuple[int, float]:
        """The id of the largest logit of `row` f32 [V], the lowest of equals, and its probability, right to 1e-5. Where
        that logit is not finite, the probability means nothing."""
        if self._kernels is not None:
            if row is not self._row:
                self._row = row if row.flags.c_contiguous else np.ascontiguousarray(row)
                self._to_row = self._row.ctypes.data
            token_id = self._kernels.likeliest(self._to_row, row.size, self._to_share)
            return token_id, float(self._share[0])
        if self._exp.size != row.size:
            self._exp = np.empty_like(row)
        token_id = int(row.argmax())
        with np.errstate(invalid="ignore"):
            np.subtract(row, row[token_id], out=self._exp)
            return token_id, float(1.0 / np.exp(self._exp, out=self._exp).sum())


def top_ids(row: NDArray[np.float32], k: int, exp: ChunkedExp) -> NDArray[np.int64]:
    """Ids of the `k` largest logits, largest first, the lower id first among equals."""
    ids, _ = exp.largest(row, k)
    return ids[(-row[ids]).argsort(kind="stable")[:k]]


def heaviest(weights: NDArray[np.float32], total: float, mass: float) -> NDArray[np.int64]:
    """Ids, ascending, of a superset of the fewest largest `weights` f32 [V] (>= 0, their sum `total`) that reach
    `mass`: by a histogram of their leading bits (sign, exponent and seven bits of mantissa order positive floats), with
    no sort."""
    # What is left out weighs total - mass, so the heaviest of it weighs at least the mean, and what is kept no less.
    ids = (weights >= np.float32((total - mass) / weights.size * (1 - 1e-3))).nonzero()[0]
    weights = weights[ids]
    leading = weights.view(np.uint32) >> np.uint32(16)
    bins = np.minimum(leading.max() - leading, np.uint32(_BINS - 1)).astype(np.int64)
    cumulative = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    # One bin more than the crossing one: `mass` and these sums differ by rounding.
    return ids[bins <= cumulative.searchsorted(mass, side="left") + 1]
