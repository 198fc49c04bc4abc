"""Cached blocks that were evicted from the pool, kept in the host swap tier until a prefix hit brings them back.

Bookkeeping only, as everywhere in the scheduler: moves are planned here and carried out, in their order, before the
pass. A block is known to the prefix cache or to this tier, never to both.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from runtime.swap import SwapMove, SwapSlots

if TYPE_CHECKING:
    from runtime.prefix_cache import CachedBlock


class SpillTier:
    """Evicted cached blocks by digest, the least recently spilled first: those give way when slots run out.

    The slots are shared with preempted sequences, which take precedence (`make_room`). `moves` is where the copies
    between blocks and slots are planned.
    """

    def __init__(self, slots: SwapSlots, moves: list[SwapMove]):
        self.slots = slots
        self.moves = moves
        self.spilled = 0  # blocks written so far
        self.restored = 0  # blocks brought back so far
        self._kept: OrderedDict[bytes, tuple[CachedBlock, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, node: CachedBlock, block_id: int) -> None:
        """Keep an evicted block's contents; where preempted sequences hold every slot they are lost."""
        self.make_room(1)
        slots = self.slots.allocate(1)
        if slots is None:
            return
        self._kept[node.digest] = node, slots[0]
        self.moves.append(SwapMove(True, block_id, slots[0]))
        self.spilled += 1

    def find(self, digest: bytes) -> CachedBlock | None:
        """The node of a kept block. The caller compares its tokens and ancestors."""
        entry = self._kept.get(digest)
        return None if entry is None else entry[0]

    def take(self, node: CachedBlock) -> int:
        """Hand over a kept block: it is the caller's to bring back (`restore`)."""
        return self._kept.pop(node.digest)[1]

    def restore(self, slot: int, block_id: int) -> None:
        """Plan to copy what was taken into a block. The slot may be written again by later moves."""
        self.moves.append(SwapMove(False, block_id, slot))
        self.slots.free(slot)
        self.restored += 1

    def discard(self, digest: bytes) -> None:
        """Forget a block, which has been computed anew."""
        entry = self._kept.pop(digest, None)
        if entry is not None:
            self.slots.free(entry[1])

    def make_room(self, count: int) -> None:
        """Give up the oldest blocks until `count` slots are free, as far as there are any."""
        while self._kept and self.slots.num_free < count:
            _, (_, slot) = self._kept.popitem(last=False)
            self.slots.free(slot)

    def clear(self) -> int:
        """Forget everything. Returns how many blocks there were."""
        count = len(self._kept)
        for _, slot in self._kept.values():
            self.slots.free(slot)
        self._kept.clear()
        return count

    def held_slots(self) -> set[int]:
        """The slots that hold a block here."""
        return {slot for _, slot in self._kept.values()}
