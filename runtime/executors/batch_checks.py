"""What every executor checks of a batch before an engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.executor import StepBatch


def check_ids(batch: StepBatch, num_blocks: int, vocab_size: int) -> None:
    """Raise `ValueError` on a block or token id out of range, which engines do not notice before they crash."""
    for name, ids, limit in (("block_ids", batch.block_ids, num_blocks), ("token_ids", batch.token_ids, vocab_size)):
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            raise ValueError(f"{name} must lie in 0..{limit - 1}, and the batch has {ids.min()}..{ids.max()}")
