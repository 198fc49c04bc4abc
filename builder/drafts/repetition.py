"""Where a text says again what it said before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUND = 64  # tokens


def repeated(token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool [T]: whether a token of i32 [T] ends four that stood in the text before."""
    ids = token_ids.tolist()
    found, seen = np.zeros(len(ids), bool), set()
    for place, four in enumerate(zip(ids, ids[1:], ids[2:], ids[3:], strict=False), 3):
        found[place] = four in seen
        seen.add(four)
    return found


def goes_round(token_ids: NDArray[np.int32]) -> bool:
    """Whether a text, i32 [T], has come to go round in circles: nine of ten of its last tokens were said before."""
    return len(token_ids) >= 2 * _ROUND and bool(repeated(token_ids)[-_ROUND:].mean() >= 0.9)
