"""Which tokens may be sampled: min_p, then top_k, then top_p (vLLM's order), then typical_p.

Each keeps a set; probabilities are those of the set, renormalised. Nothing here sorts a vocabulary unless the mass
asked for spreads over most of it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.rows import ChunkedExp, at_least_k_largest

# top_p looks for its set among this many of the largest logits, then among so many times more.
_FIRST_CANDIDATES = 32
_GROWTH = 8


def weights_of(values: NDArray[np.float32], row_max: float, temperature: float) -> NDArray[np.float64]:
    """Unnormalised probabilities exp((values - row_max) / temperature), f64."""
    return np.exp((values.astype(np.float64) - row_max) / temperature)


def keep_top_k(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids, ascending, of the logits that reach the k-th largest (all of its equals too, as in vLLM)."""
    ids = at_least_k_largest(row, k)
    if ids.size <= k:
        return ids
    values = row[ids]
    return ids[values >= np.partition(values, ids.size - k)[ids.size - k]]


def keep_top_p(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64] | None:
    """Indices, ascending, of the fewest largest weights that together reach `mass`; None where all do not.

    At least one is kept. Among equals at the edge the lower index is kept.
    """
    descending = np.sort(weights)[::-1]
    count = int(np.cumsum(descending).searchsorted(mass, side="left")) + 1
    if count > weights.size:
        return None
    edge = descending[count - 1]
    kept = np.flatnonzero(weights >= edge)
    if kept.size > count:  # equals at the edge: drop the last ones
        at_edge = np.flatnonzero(weights[kept] == edge)
        kept = np.delete(kept, at_edge[at_edge.size - (kept.size - count) :])
    return kept


def keep_typical(weights: NDArray[np.float64], typical_p: float) -> NDArray[np.int64]:
    """Locally typical sampling (Meister et al. 2022): indices, ascending, of the fewest tokens that reach the mass
    `typical_p`, taken in order of how near their surprise is to the distribution's entropy. At least one is kept."""
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    present = probabilities > 0
    entropy = float(np.dot(probabilities[present], surprise[present]))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    order = order[present[order]]
    count = int(np.cumsum(probabilities[order]).searchsorted(typical_p, side="left")) + 1
    return np.sort(order[:count])


def select(
    row: NDArray[np.float32],
    row_max: float,
    exp: ChunkedExp,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be sampled from `row` f32 [V]: ids ascending i64 [K] and unnormalised weights f64 [K].

    `row_max` is the row's finite maximum; forbidden tokens are minus infinity and are never selected.
    """
    ids = None
    if 0 < top_k < row.size:
        ids = keep_top_k(row, top_k)
    if min_p > 0.0:
        threshold = row_max + temperature * math.log(min_p)
        if ids is None:
            ids = np.flatnonzero(row >= threshold)
        else:
            ids = ids[row[ids] >= threshold]
    if ids is None and top_p < 1.0:
        ids, weights = _nucleus_of_all(row, row_max, exp, temperature, top_p)
    else:
        if ids is None:
            ids = np.flatnonzero(row > -np.inf)
        weights = weights_of(row[ids], row_max, temperature)
        if weights.size and weights.min() == 0.0:  # forbidden, or too unlikely for f64
            ids, weights = ids[weights > 0.0], weights[weights > 0.0]
        if top_p < 1.0:
            kept = keep_top_p(weights, top_p * float(weights.sum()))
            if kept is not None:
                ids, weights = ids[kept], weights[kept]
    if typical_p < 1.0:
        kept = keep_typical(weights, typical_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _nucleus_of_all(
    row: NDArray[np.float32], row_max: float, exp: ChunkedExp, temperature: float, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """top_p over the whole vocabulary, searched among a growing number of the largest logits."""
    sums, shift = exp.fill(row, row_max, temperature)
    # The mass in units of `weights_of`, whose shift is the maximum.
    mass = top_p * float(np.add.reduce(sums, dtype=np.float64)) * math.exp(shift - row_max / temperature)
    k = _FIRST_CANDIDATES
    while True:
        ids = at_least_k_largest(row, k)
        weights = weights_of(row[ids], row_max, temperature)
        kept = keep_top_p(weights, mass)
        if kept is not None:
            return ids[kept], weights[kept]
        if ids.size >= row.size:
            present = weights > 0.0
            return ids[present], weights[present]
        k = min(_GROWTH * max(k, ids.size), row.size)
