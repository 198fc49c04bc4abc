"""What every executor checks of a batch before an engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.executor import StepBatch

# Of so many numbers a list is quicker than two reductions.
_FEW = 64


def check_ids(batch: StepBatch, num_blocks: int, vocab_size: int) -> None:
    """Raise `ValueError` on a block or token id out of range, which engines do not notice before they crash."""
    for name, ids, limit in (("block_ids", batch.block_ids, num_blocks), ("token_ids", batch.token_ids, vocab_size)):
        least, largest = (ids.min(), ids.max()) if ids.size > _FEW else _bounds(ids.tolist())
        if least < 0 or largest >= limit:
            raise ValueError(f"{name} must lie in 0..{limit - 1}, and the batch has {least}..{largest}")


def _bounds(ids: list[int]) -> tuple[int, int]:
    return (min(ids), max(ids)) if ids else (0, -1)
