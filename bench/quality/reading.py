"""An engine as something that reads tokens and gives logits: the runtime's own executor, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.artifact import Artifact
from runtime.errors import PlancastError
from runtime.executor import StepBatch
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.manifest import Manifest


class Reader:
    """The engine of one artifact, its cache large enough for one sequence of the whole context."""

    def __init__(self, folder: Path, *, num_threads: int | None = None):
        from runtime.executors import open_executor

        self.artifact = Artifact.open(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.executor = open_executor(self.artifact, num_threads=num_threads)
        self._block = self.executor.kv_layout.block_size
        self.executor.allocate(-(-self.manifest.limits.max_context_len // self._block) + 1)

    @property
    def manifest(self) -> Manifest:
        return self.artifact.manifest

    @property
    def prefix(self) -> list[int]:
        """What the tokenizer puts before any text."""
        bos = self.tokenizer.bos_token_id
        return [bos] if self.tokenizer.adds_bos and bos is not None else []

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chunks(
        self, tokens: list[int], past: int = 0, *, size: int | None = None, logits_from: int = 0
    ) -> Iterator[NDArray[np.float32]]:
        """Read `tokens` after `past` tokens that lie in the cache; yield logits f32 `[rows, V]` chunk by chunk.

        Rows before the token `logits_from` are left out. What is yielded is the executor's own array: use it at once.
        """
        most = min(size or self.manifest.limits.max_num_batched_tokens, self.manifest.limits.max_num_batched_tokens)
        for start in range(0, len(tokens), most):
            part = np.array(tokens[start : start + most], np.int64)
            end = past + start + len(part)
            table = np.arange(-(-end // self._block), dtype=np.int32)
            rows = np.arange(max(0, logits_from - start), len(part), dtype=np.int64)
            # An engine computes at least one row; one that nobody asked for is dropped.
            wanted = rows if len(rows) else np.array([len(part) - 1], np.int64)
            logits = self.executor.run(
                StepBatch(
                    token_ids=part,
                    positions=np.arange(past + start, end, dtype=np.int64),
                    past_lens=np.array([past + start], np.int32),
                    query_starts=np.array([0, len(part)], np.int32),
                    block_ids=table,
                    block_starts=np.array([0, len(table)], np.int32),
                    max_context_len=end,
                    logits_rows=wanted,
                )
            )
            if not np.isfinite(logits).all():
                raise PlancastError(f"{self.artifact.path}: its engine gives logits that are not finite")
            if len(rows):
                yield logits

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.executor.close()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural log probabilities `[rows, V]`, in f64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return rows
