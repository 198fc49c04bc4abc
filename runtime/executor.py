"""What the runtime asks of a compiled engine: one protocol, one input type.

A step is one pass of the model over a flat, unpadded batch: sequences lie end to end, `query_starts` says where each
begins, and the block tables are CSR. Several query tokens on a sequence with past serve chunked prefill and
speculative verification alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.kv_layout import KvLayout


@dataclass(slots=True)
class StepBatch:
    """One step's inputs. T tokens in B sequences, N blocks in all tables, R rows that want logits."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    past_lens: NDArray[np.int32]  # [B] tokens already in the cache
    query_starts: NDArray[np.int32]  # [B+1] where each sequence's tokens begin; the last is T
    block_ids: NDArray[np.int32]  # [N] the tables end to end, covering past and new tokens
    block_starts: NDArray[np.int32]  # [B+1]
    max_context_len: int  # the largest past + new of any sequence
    logits_rows: NDArray[np.int64]  # [R] indices into T, ascending
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) blocks, copied before the pass


@runtime_checkable
class Executor(Protocol):
    """Runs steps of one engine on one device. Not thread-safe: one owner calls it.

    Block ids run from 0 to `num_blocks` - 1. The executor owns the cache's memory and nothing of its bookkeeping.
    """

    kv_layout: KvLayout
    vocab_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks allocated so far (0 before `allocate`)."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache. Raises `PlancastError` with the numbers where memory does not suffice."""
        ...

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Apply `batch.copies`, write the new tokens' keys and values, and return logits f32 [R, vocab_size].

        The array may be reused by the next call: copy what must outlive it.
        """
        ...

    def read_block(self, block_id: int) -> bytes:
        """The block's cells of every layer, for the host swap tier."""
        ...

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned."""
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...
