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

from runtime.sampling.rows import ChunkedExp, ids_from
from runtime.sampling_params import SamplingParams

# Hotter is no different: all logits that can be sampled weigh the same.
MAX_TEMPERATURE = 1e30


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

    def lowest(self, row_max: float) -> float:
        """The lowest logit that min_p keeps."""
        return row_max + self.temperature * math.log(self.min_p) if self.min_p > 0.0 else -math.inf


@dataclass(slots=True)
class Candidates:
    """A superset of what may be sampled: its ids i64 [K], ascending, and logits f32 [K]; the row's maximum.

    Where `row_max` is not finite nothing can be sampled, and there are no ids. `mass`: how much top_p keeps, in units
    of exp((logit - row_max) / temperature), where it refers to the whole vocabulary; None where it refers to what top_k
    and min_p leave of the candidates.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    row_max: float
    mass: float | None = None


def candidates(row: NDArray[np.float32], exp: ChunkedExp, restriction: Restriction) -> Candidates:
    """The candidates of `row` f32 [V]. `exp` is scratch."""
    top_k = restriction.top_k if restriction.top_k < row.size else 0
    if not top_k and restriction.min_p == 0.0 and restriction.top_p < 1.0:
        return _nucleus(row, exp, restriction)
    if top_k:
        ids, row_max = exp.largest(row, top_k, restriction.lowest(0.0))
        return Candidates(ids, row[ids], row_max)
    row_max = float(row.max())
    if not math.isfinite(row_max):
        return _none(row_max)
    if restriction.min_p > 0.0:
        ids = ids_from(row, restriction.lowest(row_max))
    else:
        ids = ids_from(row, float(np.finfo(np.float32).min))
    return Candidates(ids, row[ids], row_max)


def _none(row_max: float) -> Candidates:
    return Candidates(np.empty(0, np.int64), np.empty(0, np.float32), row_max)


def select(found: Candidates, restriction: Restriction) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The set itself: ids ascending i64 [K] and unnormalised probabilities f64 [K], none of them 0."""
    ids, values, row_max = found.ids, found.values, found.row_max
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


def _nucleus(row: NDArray[np.float32], exp: ChunkedExp, restriction: Restriction) -> Candidates:
    """A superset of top_p's set over the whole vocabulary, searched among more and more of the largest logits."""
    temperature = restriction.temperature
    if not exp.fill(row, temperature):
        return _none(float(row.max()))
    share = restriction.top_p * exp.total
    ids = exp.nucleus(share)
    values = row[ids]
    row_max = float(values.max())
    # From the units of `exp`, shifted by `shift`, to those of `weights_of`, shifted by the maximum.
    return Candidates(ids, values, row_max, share * math.exp(exp.shift - row_max / temperature))
