"""Batches of a draft head, for the tests of its executors."""

from __future__ import annotations

import numpy as np

from runtime.executor import StepBatch

BLOCK = 32


def draft_batch(parts: list[tuple[int, int]], *, width: int, seed: int = 0, token_id: int | None = None) -> StepBatch:
    """Sequences of (past, new) tokens, each with logits of its last half; the n-th in blocks 3 n, 3 n + 1, ... Tokens
    are drawn, or `token_id`."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(new for _, new in parts)])
    tables = [np.arange(-(-(past + new) // BLOCK)) + 3 * at for at, (past, new) in enumerate(parts)]
    rows = [np.arange(start + new // 2, start + new) for start, (_, new) in zip(starts, parts, strict=False)]
    total = int(starts[-1])
    return StepBatch(
        token_ids=rng.integers(0, 300, total) if token_id is None else np.full(total, token_id),
        positions=np.concatenate([np.arange(past, past + new) for past, new in parts]),
        past_lens=np.array([past for past, _ in parts], np.int32),
        query_starts=starts.astype(np.int32),
        block_ids=np.concatenate(tables).astype(np.int32),
        block_starts=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        max_context_len=max(past + new for past, new in parts),
        logits_rows=np.concatenate(rows),
        hidden_states=rng.standard_normal((total, width)).astype(np.float32),
    )
