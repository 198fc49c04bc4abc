"""How well the KV cache is used: internal fragmentation, and what sharing saves."""

from __future__ import annotations

import msgspec

from runtime.scheduling.kv_manager import KvManager
from runtime.sequence import Request


class KvReport(msgspec.Struct, kw_only=True):
    """A snapshot over the blocks that running requests hold. Counts are blocks unless a name says tokens."""

    block_size: int
    held_blocks: int  # distinct blocks in the tables
    table_entries: int  # what the tables would take without sharing
    stored_tokens: int  # cells of the held blocks that hold a token's keys and values

    @property
    def waste(self) -> float:
        """Share of the held cells that holds nothing (internal fragmentation)."""
        cells = self.held_blocks * self.block_size
        return 1.0 - self.stored_tokens / cells if cells else 0.0

    @property
    def saved_blocks(self) -> int:
        """Blocks that sharing saves."""
        return self.table_entries - self.held_blocks

    @property
    def saved(self) -> float:
        """Share of the unshared need that sharing saves."""
        return self.saved_blocks / self.table_entries if self.table_entries else 0.0


def kv_report(kv: KvManager, requests: list[Request]) -> KvReport:
    """Look at every block that the requests hold."""
    size = kv.block_size
    filled: dict[int, int] = {}  # block -> cells that hold a token
    entries = 0
    for request in requests:
        for sequence in request.live:
            entries += len(sequence.block_ids)
            for index, block_id in enumerate(sequence.block_ids):
                cells = min(size, max(0, sequence.num_computed - index * size))
                filled[block_id] = max(filled.get(block_id, 0), cells)
    return KvReport(block_size=size, held_blocks=len(filled), table_entries=entries, stored_tokens=sum(filled.values()))
