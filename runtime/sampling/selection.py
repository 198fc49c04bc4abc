"""Which tokens may be sampled from a row: min_p, then top_k, then top_p (vLLM's order), then typical_p.

Each keeps a set; probabilities are those of the set, renormalised. `candidates` finds, without sorting the vocabulary,
a superset of the set: mostly some dozen tokens. `select` cuts it down to the set itself, for one row;
`runtime/sampling/narrow.py` does the same for many rows at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.rows import ChunkedExp, ids_from, kth_bound
from runtime.sampling_params import SamplingParams

# Hotter is no different: all logits that can be sampled weigh the same.
MAX_TEMPERATURE = 1e30
# Bins of the histogram of weights, 128 a binade; those below the last are one.
_BINS = 8192


@dataclass(frozen=True, slots=True)
class Restriction:
    """What narrows the choice: 0 for `top_k`, 0.0 for `min_p`, 1.0 for `top_p` and `typical_p` do not."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> Restriction:
        return cls(
            min(params.temperature, MAX_TEMPERATURE), max(params.top_k, 0), params.top_p, params.min_p, params.typical_p
        )

    @property
    def is_void(self) -> bool:
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0 and self.typical_p == 1.0

    @property
    def needs_chunks(self) -> bool:
        return self.top_k > 0 or (self.top_p < 1.0 and self.min_p == 0.0)

    def lowest(self, row_max: float) -> float:
        """The lowest logit that min_p keeps."""
        return row_max + self.temperature * math.log(self.min_p) if self.min_p > 0.0 else -math.inf


@dataclass(slots=True)
class Candidates:
    """A superset of what may be sampled: its ids i64 [K], ascending, and logits f32 [K].

    `mass`: how much top_p keeps, in units of exp((logit - row_max) / temperature), where it refers to the whole
    vocabulary; None where it refers to what top_k and min_p leave of the candidates.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    mass: float | None = None


def candidates(
    row: NDArray[np.float32], maxima: NDArray[np.float32], row_max: float, exp: ChunkedExp, restriction: Restriction
) -> Candidates:
    """The candidates of `row` f32 [V]; `row_max` is its finite maximum, `maxima` those of its chunks where
    `restriction.needs_chunks`. `exp` is scratch."""
    top_k = restriction.top_k if restriction.top_k < row.size else 0
    if top_k:
        ids = ids_from(row, max(kth_bound(row, maxima, top_k), restriction.lowest(row_max)))
    elif restriction.min_p > 0.0:
        ids = ids_from(row, restriction.lowest(row_max))
    elif restriction.top_p < 1.0:
        return _nucleus(row, maxima, row_max, exp, restriction)
    else:
        ids = ids_from(row, float(np.finfo(np.float32).min))
    return Candidates(ids, row[ids])


def select(
    found: Candidates, row_max: float, restriction: Restriction
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The set itself: ids ascending i64 [K] and unnormalised probabilities f64 [K], none of them 0."""
    ids, values = found.ids, found.values
    if 0 < restriction.top_k < values.size:  # all that equal the k-th largest stay, as in vLLM
        kth = np.partition(values, values.size - restriction.top_k)[values.size - restriction.top_k]
        keep = values >= max(float(kth), restriction.lowest(row_max))
        ids, values = ids[keep], values[keep]
    if restriction.top_p < 1.0:
        ids, values = _keep_top_p(ids, values, found.mass, row_max, restriction)
    weights = weights_of(values, row_max, restriction.temperature)
    if restriction.typical_p < 1.0:
        kept = keep_typical(weights, restriction.typical_p)
        ids, weights = ids[kept], weights[kept]
    if weights.min() > 0.0:
        return ids, weights
    present = weights > 0.0  # not too unlikely for f64
    return ids[present], weights[present]


def weights_of(values: NDArray[np.float32], row_max: float, temperature: float) -> NDArray[np.float64]:
    """Unnormalised probabilities exp((values - row_max) / temperature), f64."""
    return np.exp((values.astype(np.float64) - row_max) / temperature)


def _keep_top_p(
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    mass: float | None,
    row_max: float,
    restriction: Restriction,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The fewest largest values whose weights reach the mass (all, where they do not; at least one).

    `mass` None: the share `top_p` of their sum. Among equals at the edge the lower ids stay.
    """
    descending = np.sort(values)[::-1]
    cumulative = weights_of(descending, row_max, restriction.temperature).cumsum()
    if mass is None:
        mass = restriction.top_p * float(cumulative[-1])
    count = min(int(cumulative.searchsorted(mass, side="left")) + 1, values.size)
    edge = descending[count - 1]
    kept = (values >= edge).nonzero()[0]
    if kept.size > count:  # equals at the edge: drop the last ones
        at_edge = (values[kept] == edge).nonzero()[0]
        kept = np.delete(kept, at_edge[at_edge.size - (kept.size - count) :])
    return ids[kept], values[kept]


def keep_typical(weights: NDArray[np.float64], typical_p: float) -> NDArray[np.int64]:
    """Locally typical sampling (Meister et al. 2022): indices, ascending, of the fewest tokens that reach the mass
    `typical_p`, taken in order of how near their surprise is to the distribution's entropy. At least one is kept."""
    probabilities = weights / np.cumsum(weights)[-1]
    present = np.flatnonzero(probabilities > 0.0)
    surprise = -np.log(probabilities[present])
    entropy = float(np.cumsum(probabilities[present] * surprise)[-1])
    order = present[np.argsort(np.abs(surprise - entropy), kind="stable")]
    count = int(np.cumsum(probabilities[order]).searchsorted(typical_p, side="left")) + 1
    return np.sort(order[:count])


def _nucleus(
    row: NDArray[np.float32], maxima: NDArray[np.float32], row_max: float, exp: ChunkedExp, restriction: Restriction
) -> Candidates:
    """A superset of top_p's set over the whole vocabulary, searched among more and more of the largest logits."""
    temperature = restriction.temperature
    exp.fill(row, temperature)
    # From the units of `exp`, shifted by `shift`, to those of `weights_of`, shifted by the maximum.
    mass = restriction.top_p * exp.total * math.exp(exp.shift - row_max / temperature)
    # The k largest chunk maxima are k logits: where they alone reach the mass, so do all logits down to the k-th.
    descending = np.sort(maxima)[::-1]
    weights = np.exp((descending - np.float32(row_max)) / np.float32(temperature))
    k = int(weights.cumsum().searchsorted(mass * (1 + 1e-4), side="left"))  # 1e-4: these sums are f32
    ids = ids_from(row, descending[min(k, descending.size - 1)])
    if k == descending.size and float(exp.values[ids].sum(dtype=np.float64)) < restriction.top_p * exp.total:
        ids = _heaviest(exp.values, restriction.top_p * exp.total)
    return Candidates(ids, row[ids], mass)


def _heaviest(weights: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Ids of a superset of the fewest largest `weights` f32 [V] (>= 0) that reach `mass`: by a histogram of their
    leading bits (sign, exponent and seven bits of mantissa order positive floats), with no sort."""
    leading = weights.view(np.uint32) >> np.uint32(16)
    bins = np.minimum(leading.max() - leading, np.uint32(_BINS - 1)).astype(np.int64)
    cumulative = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    # One bin more than the crossing one: `mass` and these sums differ by rounding.
    return np.flatnonzero(bins <= cumulative.searchsorted(mass, side="left") + 1)
