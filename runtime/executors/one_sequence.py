"""A pass over a few tokens of one sequence, written straight into a graph's inputs.

A draft head's pass is so short that to put a batch together, and to take it in, took half as long again: each of the
many things that touched had been driven out of the caches by the target's pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from plugins.block.native import NativeGraph

# What a batch of one sequence has of them, with logits of one row.
_FIXED = {"past_lens": 1, "query_starts": 2, "block_starts": 2, "logits_rows": 1}


class OneSequence:
    """Runs `graph` for one sequence. It writes to `fields` (place of the input and the array that it reads, by the
    field of `StepBatch`) and gives views of `results` (logits [R, V] and hidden states [R, H]): whoever binds other
    arrays to the graph makes another `OneSequence`.

    Attributes:
        logits: f32 [V], of the last pass's last token.
        hidden_states: f32 [1, H], what they were read off.
    """

    def __init__(
        self,
        graph: NativeGraph,
        num_threads: int,
        fields: Mapping[str, tuple[int, NDArray[Any]]],
        results: tuple[NDArray[np.float32], NDArray[np.float32]],
    ):
        self.logits, self.hidden_states = results[0][0], results[1][:1]
        self._graph, self._num_threads = graph, num_threads
        places = {name: place for name, (place, _) in fields.items()}
        self._by_token = [places[name] for name in ("token_ids", "positions", "hidden_states") if name in places]
        self._fixed = [(places[name], length) for name, length in _FIXED.items()]
        self._blocks_place = places["block_ids"]
        arrays = {name: array for name, (_, array) in fields.items()}
        self._states = arrays.pop("hidden_states")
        self._most_tokens, self._most_blocks = len(self._states), len(arrays["block_ids"])
        views = {name: _numbers(each) for name, each in arrays.items()}
        self._token_ids, self._positions = views["token_ids"], views.get("positions")
        self._past_lens, self._query_starts = views["past_lens"], views["query_starts"]
        self._block_ids, self._block_starts = views["block_ids"], views["block_starts"]
        self._logits_rows = views["logits_rows"]

    def fits(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether there is room for so many tokens of a sequence with so many blocks."""
        return num_tokens <= self._most_tokens and num_blocks <= self._most_blocks

    def run(self, token_ids: array[int], start: int, block_ids: array[int], states: NDArray[np.float32]) -> None:
        """One pass over `token_ids` [T] at the positions from `start` on, with `states` f32 [T, H]. `block_ids`: the
        sequence's table, past and new tokens. All of them must be in range, and `fits`."""
        count, blocks, set_length = len(token_ids), len(block_ids), self._graph.set_length
        if count == 1:
            self._token_ids[0] = token_ids[0]
        else:
            self._token_ids[:count] = array("q", token_ids)
        if self._positions is not None:
            for at in range(count):
                self._positions[at] = start + at
        self._past_lens[0] = start
        self._query_starts[0], self._query_starts[1] = 0, count
        self._block_ids[:blocks] = block_ids
        self._block_starts[0], self._block_starts[1] = 0, blocks
        self._logits_rows[0] = count - 1
        self._states[:count] = states
        for place in self._by_token:
            set_length(place, count)
        for place, length in self._fixed:
            set_length(place, length)
        set_length(self._blocks_place, blocks)
        self._graph.run(self._num_threads)


def _numbers(values: NDArray[Any]) -> memoryview[int]:
    """A view of integers, which takes one in less time than an array does."""
    data = values.data.cast("B")
    return data.cast("q") if values.itemsize == 8 else data.cast("i")
