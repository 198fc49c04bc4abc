"""The NumPy truth of the sampling kernels, in f64. The runtime's own sampler has the same rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Order = Literal["down", "up", "chunked"]


def distribution(
    logits: NDArray[np.float32], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """The probabilities f64 [V] that a row is sampled from; one-hot where `temperature` is 0.

    top_k keeps all that equal the k-th largest; min_p what has at least that share of the largest probability; top_p
    the fewest largest of those that reach its share of their sum, the lower ids of equals at the edge.
    """
    x = logits.astype(np.float64)
    result = np.zeros(len(x))
    if temperature == 0:
        result[int(np.argmax(x))] = 1
        return result
    weights = np.exp((x - x.max()) / temperature)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep &= x >= np.sort(x)[-top_k]
    if min_p > 0:
        keep &= x >= x.max() + temperature * math.log(min_p)
    weights = np.where(keep, weights, 0)
    if top_p < 1:
        order = np.argsort(-np.where(keep, x, -np.inf), kind="stable")
        cumulative = np.cumsum(weights[order])
        count = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
        weights[order[count:]] = 0
    return weights / weights.sum()


def pick(probabilities: NDArray[np.float64], u: float, order: Order = "down") -> int:
    """The first id, in that order, whose cumulative probability exceeds `u`.

    `down`: from the likeliest on, the lower id first among equals; `up`: by id; `chunked`: in a matrix of 64 lines,
    column by column, as the runtime draws from rows that no top_k, top_p or min_p restricts.
    """
    size = len(probabilities)
    ids = np.arange(size)
    if order == "down":
        ids = np.argsort(-probabilities, kind="stable")
    elif order == "chunked":
        ids = np.arange(64 * -(-size // 64)).reshape(64, -1).T.ravel()
        ids = ids[ids < size]
    cumulative = np.cumsum(probabilities[ids])
    goal = min(u * cumulative[-1], math.nextafter(cumulative[-1], 0))
    return int(ids[np.searchsorted(cumulative, goal, side="right")])


def verify(
    target: Sequence[NDArray[np.float64]],
    draft_tokens: Sequence[int],
    draft: Sequence[NDArray[np.float64]] | None,
    token_u: Sequence[float],
    accept_u: Sequence[float] = (),
    residual_u: Sequence[float] = (),
    order: Order = "down",
) -> tuple[int, int]:
    """Speculative sampling of one sequence (Leviathan et al. 2023): how many drafted tokens stay, and the token after.

    `target` has one distribution more than there are drafted tokens. `draft` None: the proposals were certain; then a
    token is drawn at each place as without them, and a proposal stays where it is that token. `order` as in `pick`.
    """
    for i, token in enumerate(draft_tokens):
        if draft is None:
            drawn = pick(target[i], token_u[i], order)
            if drawn != token:
                return i, drawn
        elif not accept_u[i] * draft[i][token] < target[i][token]:
            residual = np.maximum(target[i] - draft[i], 0)
            return i, pick(residual if residual.sum() > 0 else target[i], residual_u[i], "up")
    return len(draft_tokens), pick(target[-1], token_u[len(draft_tokens)], order)
