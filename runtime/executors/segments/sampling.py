"""Sampling where the logits lie: which kernels run on a step's rows, and the one small copy that comes back.

What goes up and what comes down are one block of bytes each, as long as the step has rows. Both kernels run after the
step's graph and are no part of it, so their arrays need no fixed places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.executor import RowSampling, RowScores, SampledRows
from runtime.executors.segments.calls import Call
from runtime.executors.segments.plan import SegmentPlan
from runtime.sampling.narrow import MAX_CANDIDATES

MAX_TOP_LOGPROBS = 20  # what the server allows unless told otherwise
_GIVEN: dict[str, tuple[DTypeLike, int]] = {  # elements a row
    "seeds": (np.int64, 1), "temperatures": (np.float32, 1), "top_ks": (np.int32, 1), "top_ps": (np.float32, 1),
    "min_ps": (np.float32, 1), "sequences": (np.int32, 1), "positions": (np.int32, 1), "num_tops": (np.int32, 1),
}  # fmt: skip
_TOLD: dict[str, tuple[DTypeLike, int]] = {
    "tokens": (np.int32, 1), "stats": (np.float32, 3), "ranks": (np.int32, 1),
    "top_ids": (np.int32, MAX_TOP_LOGPROBS), "top_values": (np.float32, MAX_TOP_LOGPROBS),
}  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """Arrays of R rows in one block of `size` bytes, each on an address that 16 divides, as kernels count on."""

    arrays: Mapping[str, tuple[int, DTypeLike, int]]  # name -> offset, type, elements a row
    rows: int
    size: int

    @staticmethod
    def of(kinds: Mapping[str, tuple[DTypeLike, int]], rows: int) -> _Block:
        arrays, end = {}, 0
        for name, (dtype, width) in kinds.items():
            arrays[name] = (end, dtype, width)
            end += -(-np.dtype(dtype).itemsize * width * rows // 16) * 16
        return _Block(arrays, rows, end)

    def view(self, data: NDArray[np.uint8], name: str) -> NDArray:
        """The array `name` [R], or [R, elements a row], in the block's bytes."""
        offset, dtype, width = self.arrays[name]
        array = data[offset : offset + np.dtype(dtype).itemsize * width * self.rows].view(dtype)
        return array if width == 1 else array.reshape(self.rows, width)

    def addresses(self, base: int) -> dict[str, int]:
        """Where each array lies when the block begins at `base`."""
        return {name: base + offset for name, (offset, _, _) in self.arrays.items()}


def samples(plan: SegmentPlan) -> bool:
    """Whether the artifact has kernels that choose among as many candidates as the host's sampler does."""
    kernels = plan.kernels
    return plan.sample in kernels and plan.score in kernels and kernels[plan.sample].constants["MOST"] == MAX_CANDIDATES


def given_bytes(rows: int) -> int:
    """Bytes that go up for a step of so many rows."""
    return _Block.of(_GIVEN, rows).size


def told_bytes(rows: int) -> int:
    """Bytes that come down at most."""
    return _Block.of(_TOLD, rows).size


def pack_rows(sampling: RowSampling, target: NDArray[np.uint8]) -> int:
    """Write what goes up into `target`; returns its length in bytes."""
    block = _Block.of(_GIVEN, len(sampling.temperatures))
    for name in _GIVEN:
        array = getattr(sampling, name)
        block.view(target, name)[:] = array.view(np.int64) if name == "seeds" else array
    return block.size


def sampling_calls(
    plan: SegmentPlan, sampling: RowSampling, logits: int, given: int, told: int, vocab_size: int
) -> tuple[list[Call], int]:
    """The launches, with logits, what went up, and what will come down at these addresses; and how many bytes that is:
    tokens alone, unless a row wants log probabilities."""
    rows = len(sampling.temperatures)
    into = _Block.of(_TOLD, rows)
    addresses = _Block.of(_GIVEN, rows).addresses(given) | into.addresses(told)
    addresses |= {"logits": logits, "size": vocab_size, "width": MAX_TOP_LOGPROBS}
    names = [plan.sample, plan.score] if (sampling.num_tops >= 0).any() else [plan.sample]
    calls = []
    for name in names:
        assert name is not None
        parameters = plan.kernels[name].parameters
        calls.append(Call(name, (rows,), tuple(addresses[parameter] for parameter, _ in parameters)))
    return calls, into.size if len(calls) == 2 else into.arrays["stats"][0]


def read_rows(sampling: RowSampling, data: NDArray[np.uint8]) -> SampledRows:
    """What came down, copied out of `data`, for the same rows."""
    block = _Block.of(_TOLD, len(sampling.temperatures))
    tokens = block.view(data, "tokens").copy()
    if not (sampling.num_tops >= 0).any():
        return SampledRows(tokens, None)
    asked = (sampling.num_tops >= 0) & (tokens >= 0)  # the other rows hold what an earlier step left
    stats = np.where(asked[:, None], block.view(data, "stats"), np.float32(1.0)).astype(np.float64)
    scores = RowScores(
        log_sums=stats[:, 0] + np.log(stats[:, 1]),
        values=stats[:, 2].astype(np.float32),
        ranks=block.view(data, "ranks").copy(),
        top_ids=block.view(data, "top_ids").copy(),
        top_values=block.view(data, "top_values").copy(),
    )
    return SampledRows(tokens, scores)
