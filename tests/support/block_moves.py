"""Blocks that are copied on the device, or leave it and come back: one scenario for every paged executor."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from runtime.errors import PlancastError
from runtime.executor import Executor, StepBatch


def one_sequence(
    tokens: Iterable[int], past: int, block: int, copies: Iterable[tuple[int, int]] = (), rows: list[int] | None = None
) -> StepBatch:
    """A step of one sequence in one block; logits of `rows` (default: of its last token)."""
    new = np.fromiter(tokens, np.int64)
    return StepBatch(
        token_ids=new,
        positions=np.arange(past, past + len(new)),
        past_lens=np.array([past], np.int32),
        query_starts=np.array([0, len(new)], np.int32),
        block_ids=np.array([block], np.int32),
        block_starts=np.array([0, 1], np.int32),
        max_context_len=past + len(new),
        logits_rows=np.array([len(new) - 1] if rows is None else rows, np.int64),
        copies=list(copies),
    )


def check_block_moves(executor: Executor) -> None:
    """A sequence goes on from a copied block, and from one that left the cache and came back, as if nothing was.

    Closes the executor.
    """
    executor.allocate(4)
    tokens = np.arange(3, 12)

    def last_logits(block: int, copies: Iterable[tuple[int, int]] = ()) -> np.ndarray:
        return executor.run(one_sequence(tokens[-1:], 8, block, copies)).copy()

    # A chunk that wants no logits.
    assert executor.run(one_sequence(tokens[:-1], 0, 0, rows=[])).shape == (0, executor.vocab_size)
    saved = executor.read_block(0)
    expected = last_logits(0)
    assert len(saved) == executor.kv_layout.bytes_per_block
    executor.write_block(2, saved)
    assert np.array_equal(last_logits(2), expected)
    executor.write_block(0, saved)
    assert np.array_equal(last_logits(3, [(0, 1), (1, 3)]), expected)
    with pytest.raises(ValueError, match="a block has"):
        executor.write_block(0, saved[:-1])
    with pytest.raises(ValueError, match=r"block_ids must lie in 0\.\.3"):
        last_logits(4)
    executor.close()
    with pytest.raises(PlancastError, match="closed"):
        executor.allocate(1)
