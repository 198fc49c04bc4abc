"""Sampling where the logits lie: which kernels run on a step's rows, what goes up to them, and the one small copy that
comes back. Whatever launches them: what goes up and what comes down are one block of bytes each.

The kernels run after the step and are no part of its graph, so their arrays need no fixed places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.executor import RowSampling, RowScores, SampledRows
from runtime.philox import ACCEPT_STREAM, RESIDUAL_STREAM, TOKEN_STREAM
from runtime.sampling.narrow import MAX_CANDIDATES

if TYPE_CHECKING:
    from plugins.gpu.aot import Variant

SAMPLE, VERIFY, SCORE = "sample", "verify", "score"  # the kernels, in the order that they run in
MAX_TOP_LOGPROBS = 20  # what the server allows unless told otherwise
MAX_DRAFT_ENTRIES = 1 << 20  # 8 MiB: some distributions over a whole vocabulary, or thousands of restricted ones
_ALIGNMENT = 16  # bytes, as the kernels count on
_Kinds = Mapping[str, tuple[DTypeLike, tuple[int, ...]]]  # array -> type, shape


def kernel_variants() -> dict[str, Variant]:
    """The kernels by name, with the random numbers of the runtime and the candidates of its sampler. Needs triton."""
    from plugins.sampling.variants import sample_variant, score_variant, verify_variant

    return {
        SAMPLE: sample_variant(MAX_CANDIDATES, TOKEN_STREAM),
        VERIFY: verify_variant(ACCEPT_STREAM, RESIDUAL_STREAM),
        SCORE: score_variant(),
    }


@dataclass(frozen=True)
class Block:
    """Arrays in one block of `size` bytes: name -> offset, type, shape."""

    arrays: Mapping[str, tuple[int, DTypeLike, tuple[int, ...]]]
    size: int

    @staticmethod
    def of(kinds: _Kinds) -> Block:
        arrays, end = {}, 0
        for name, (dtype, shape) in kinds.items():
            arrays[name] = (end, dtype, shape)
            end += -(-np.dtype(dtype).itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return Block(arrays, end)

    def view(self, data: NDArray[np.uint8], name: str) -> NDArray:
        """The array `name` in the block's bytes."""
        offset, dtype, shape = self.arrays[name]
        return data[offset : offset + np.dtype(dtype).itemsize * math.prod(shape)].view(dtype).reshape(shape)

    def addresses(self, base: int) -> dict[str, int]:
        """Where each array lies when the block begins at `base`."""
        return {name: base + offset for name, (offset, _, _) in self.arrays.items()}


def given_block(rows: int, drafts: int = 0, entries: int = 0) -> Block:
    """What goes up for so many rows, drafts that were drawn, and tokens in their distributions."""
    kinds: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
        "seeds": (np.int64, (rows,)), "temperatures": (np.float32, (rows,)), "top_ks": (np.int32, (rows,)),
        "top_ps": (np.float32, (rows,)), "min_ps": (np.float32, (rows,)), "sequences": (np.int32, (rows,)),
        "positions": (np.int32, (rows,)), "num_tops": (np.int32, (rows,)),
    }  # fmt: skip
    if drafts:
        kinds |= {
            "drafted_rows": (np.int32, (drafts,)), "drafted_tokens": (np.int32, (drafts,)),
            "drafted_temperatures": (np.float32, (drafts,)), "draft_starts": (np.int32, (drafts + 1,)),
            "draft_ids": (np.int32, (entries,)), "draft_probs": (np.float32, (entries,)),
        }  # fmt: skip
    return Block.of(kinds)


def told_block(rows: int) -> Block:
    """What comes down: the tokens, and behind them what only rows with log probabilities fill."""
    return Block.of(
        {
            "tokens": (np.int32, (rows,)), "stats": (np.float32, (rows, 3)), "ranks": (np.int32, (rows,)),
            "top_ids": (np.int32, (rows, MAX_TOP_LOGPROBS)), "top_values": (np.float32, (rows, MAX_TOP_LOGPROBS)),
        }
    )  # fmt: skip


def wants_scores(sampling: RowSampling) -> bool:
    """Whether any row wants log probabilities."""
    return bool((sampling.num_tops >= 0).any())


def launches(sampling: RowSampling) -> list[tuple[str, int]]:
    """The kernels that sample these rows, and how many programs of each."""
    rows = len(sampling.temperatures)
    found = [(SAMPLE, rows)]
    if sampling.drafts is not None:
        found.append((VERIFY, len(sampling.drafts.rows)))
    if wants_scores(sampling):
        found.append((SCORE, rows))
    return found


def pack_rows(sampling: RowSampling, target: NDArray[np.uint8]) -> Block:
    """Write what goes up to the begin of `target`; returns how it lies there."""
    drafts = sampling.drafts
    block = given_block(len(sampling.temperatures), *((len(drafts.rows), len(drafts.ids)) if drafts else ()))
    arrays = {name: getattr(sampling, name) for name in block.arrays if hasattr(sampling, name)}
    arrays["seeds"] = sampling.seeds.view(np.int64)
    if drafts is not None:
        arrays |= {
            "drafted_rows": drafts.rows, "drafted_tokens": drafts.tokens, "draft_starts": drafts.starts,
            "drafted_temperatures": sampling.temperatures[drafts.rows], "draft_ids": drafts.ids,
            "draft_probs": drafts.probs,
        }  # fmt: skip
    for name in block.arrays:
        block.view(target, name)[:] = arrays[name]
    if drafts is not None:
        block.view(target, "temperatures")[drafts.rows] = -1.0  # those are verified, not sampled
    return block


def told_bytes(sampling: RowSampling) -> int:
    """Bytes that come down: tokens alone, unless a row wants log probabilities."""
    block = told_block(len(sampling.temperatures))
    return block.size if wants_scores(sampling) else block.arrays["stats"][0]


def read_rows(sampling: RowSampling, data: NDArray[np.uint8]) -> SampledRows:
    """What came down, copied out of `data`, for the same rows."""
    block = told_block(len(sampling.temperatures))
    tokens = block.view(data, "tokens").copy()
    if not wants_scores(sampling):
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


def rows_left(sampling: RowSampling, sampled: SampledRows) -> NDArray[np.int64]:
    """The rows that were to be sampled and have no token: their logits are wanted after all."""
    return np.flatnonzero((sampled.tokens < 0) & (sampling.temperatures >= 0))
