"""From the hidden states of a prompt's tokens to the one vector that stands for it.

The core pools, chunk by chunk as the prompt is computed; the client shortens and normalizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.errors import PlancastError, RequestError
from runtime.manifest import EmbeddingInfo, Pooling
from runtime.outputs import RequestOutput

Hidden = NDArray[np.float32]


class Pooler:
    """Takes the hidden states of one prompt in order of position, in any chunks; a position may come again."""

    __slots__ = ("_pooling", "_vector", "num_taken")

    def __init__(self, pooling: Pooling):
        self._pooling = pooling
        self._vector: NDArray[np.float64] | Hidden | None = None
        self.num_taken = 0  # positions 0 to this one (exclusive) are in

    def rows_of(self, start: int, count: int, *, last: bool) -> int:
        """How many rows, the last ones of the chunk [start, start + count), must be computed for it.

        The chunk that ends the prompt (`last`) has one at least, so that its end shows.
        """
        if self._pooling == "mean" or (self._pooling == "cls" and start == 0):
            return count
        return int(last)

    def take(self, start: int, rows: Hidden) -> None:
        """Take the hidden states f32 [R, H] of the positions from `start` on."""
        if self._pooling == "last":
            self._vector = rows[-1].copy()  # the executor reuses its memory
        elif self._pooling == "cls":
            if start == 0 and self._vector is None:
                self._vector = rows[0].copy()
        else:
            new = rows[max(0, self.num_taken - start) :]  # after a preemption some come again
            total = new.sum(axis=0, dtype=np.float64)
            self._vector = total if self._vector is None else self._vector + total
        self.num_taken = max(self.num_taken, start + len(rows))

    def result(self) -> Hidden:
        """The pooled vector f32 [H], neither shortened nor normalized."""
        assert self._vector is not None, "nothing was taken"
        scale = self.num_taken if self._pooling == "mean" else 1
        return (self._vector / scale).astype(np.float32)


def embedding_of(
    output: RequestOutput, info: EmbeddingInfo, *, dimensions: int | None = None, normalize: bool | None = None
) -> Hidden:
    """The embedding f32 [dimensions] that a request came to: its first `dimensions` entries, then to length 1.

    Shortening is for models that were trained for it (Matryoshka representations, arXiv:2205.13147). None: the whole
    vector; as the artifact says. Raises `PlancastError` where the request ended without one (it was aborted).
    """
    if output.embedding is None:
        raise PlancastError("the request ended before its embedding was computed")
    pooled = np.frombuffer(output.embedding, np.float32)
    vector = pooled if dimensions is None else pooled[:dimensions]
    if not (info.normalize if normalize is None else normalize):
        return vector
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0.0 else (vector / length).astype(np.float32)


def check_dimensions(dimensions: int | None, info: EmbeddingInfo) -> None:
    """Raise `RequestError` unless an embedding can be shortened to `dimensions` entries."""
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= info.size:
        raise RequestError(
            f"dimensions is {dimensions!r}: this model's embeddings have {info.size} entries, and can be shortened to "
            f"1 to {info.size}",
            "dimensions",
        )
