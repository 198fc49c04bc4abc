"""Fixed-size KV blocks: reference counts, a free list, and an LRU of cached blocks that nobody uses at the moment.

Bookkeeping only: the pool knows block ids, never their contents. A block is in exactly one state:

    free    nobody holds it and its contents mean nothing
    idle    nobody holds it, but the prefix cache can still hand it out; evicted oldest first when free blocks run out
    used    one or more block tables hold it (its reference count)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from runtime.errors import PlancastError

FREE, IDLE, USED, SHARED = range(4)  # states, as `BlockPool.states` encodes them


class OutOfBlocksError(PlancastError):
    """The pool was asked for more blocks than it has. The scheduler asks first, so this is a bug, not an overload."""


class BlockPool:
    """Block ids 0 to `num_blocks` - 1. `on_evict(block_id)` is told when an idle block is about to be reused."""

    __slots__ = ("_free", "_idle", "cached", "num_blocks", "on_evict", "ref_counts")

    def __init__(self, num_blocks: int, on_evict: Callable[[int], object] | None = None):
        if num_blocks < 1:
            raise PlancastError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.ref_counts = [0] * num_blocks
        self.cached = bytearray(num_blocks)  # 1 where the prefix cache knows the block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def allocate(self) -> int:
        """A block with reference count 1. Raises `OutOfBlocksError` when none is free."""
        if self._free:
            block_id = self._free.pop()
        elif self._idle:
            block_id, _ = self._idle.popitem(last=False)
            self.cached[block_id] = 0
            if self.on_evict is not None:
                self.on_evict(block_id)
        else:
            raise OutOfBlocksError(f"all {self.num_blocks} KV blocks are in use")
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a used or idle block."""
        if self.ref_counts[block_id] == 0:
            if not self.cached[block_id]:
                raise ValueError(f"block {block_id} is free: only a used or cached block can be shared")
            del self._idle[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one makes the block idle when it is cached, else free."""
        count = self.ref_counts[block_id]
        if count <= 0:
            raise ValueError(f"block {block_id} is released twice")
        self.ref_counts[block_id] = count - 1
        if count == 1:
            if self.cached[block_id]:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)

    def release_table(self, block_ids: Sequence[int]) -> None:
        """Release a sequence's blocks, the tail first, so that a prefix outlives what builds on it."""
        for block_id in reversed(block_ids):
            self.release(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache now knows this used block."""
        if self.ref_counts[block_id] == 0:
            raise ValueError(f"block {block_id} is in nobody's table: it cannot become cached")
        self.cached[block_id] = 1

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache forgot the block; an idle one becomes free."""
        self.cached[block_id] = 0
        if block_id in self._idle:
            del self._idle[block_id]
            self._free.append(block_id)

    def states(self) -> bytes:
        """One byte a block: 0 free, 1 idle (cached), 2 used by one table, 3 shared."""
        cached = self.cached
        return bytes(
            SHARED if count > 1 else USED if count else IDLE if cached[block_id] else FREE
            for block_id, count in enumerate(self.ref_counts)
        )

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert the invariants; with every live block table, also that each reference is accounted for."""
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if free & idle:
            raise AssertionError(f"blocks {sorted(free & idle)} are both free and idle")
        for block_id, count in enumerate(self.ref_counts):
            held, cached = count > 0, bool(self.cached[block_id])
            if count < 0 or held == (block_id in free or block_id in idle):
                raise AssertionError(f"block {block_id} has {count} references and is in no or a wrong list")
            if not held and cached != (block_id in idle):
                raise AssertionError(f"block {block_id}: cached={cached}, idle={block_id in idle}")
        if tables is not None:
            expected = Counter(block_id for table in tables for block_id in table)
            for block_id, count in enumerate(self.ref_counts):
                if expected[block_id] != count:
                    raise AssertionError(
                        f"block {block_id} has {count} references, {expected[block_id]} tables hold it "
                        f"({'leak' if count > expected[block_id] else 'double free'})"
                    )
