"""The block pool: states, order of reuse, and a state machine against a model of it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.block_pool import BlockPool, OutOfBlocksError
from runtime.errors import PlancastError


def test_a_block_goes_from_free_to_used_to_free() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert sorted(blocks) == [0, 1, 2]
    assert (pool.num_free, pool.num_used, pool.states()) == (0, 3, b"\x02\x02\x02")
    with pytest.raises(OutOfBlocksError, match="all 3 KV blocks are in use"):
        pool.allocate()
    pool.share(blocks[1])
    assert pool.states()[blocks[1]] == 3
    pool.check([blocks, [blocks[1]]])
    pool.release_table(blocks)
    pool.check([[blocks[1]]])
    pool.release(blocks[1])
    pool.check([])
    assert pool.num_free == 3


def test_cached_blocks_are_reused_last_and_least_recently_released_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    table = [pool.allocate() for _ in range(3)]
    for block_id in table:
        pool.mark_cached(block_id)
    pool.release_table(table)
    assert pool.num_idle == 3
    assert pool.num_free == 4
    free = pool.allocate()
    assert free not in table
    assert not evicted
    pool.share(table[2])  # found again: not idle any more
    assert [pool.allocate(), pool.allocate()] == [table[1], table[0]] == evicted  # the tail of a prefix goes first
    pool.check([[free], [table[2]], [table[1]], [table[0]]])


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.release(block_id)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(block_id)
    with pytest.raises(ValueError, match="only a used or cached block"):
        pool.share(block_id)
    with pytest.raises(ValueError, match="nobody's table"):
        pool.mark_cached(block_id)
    with pytest.raises(PlancastError, match="at least 1 block"):
        BlockPool(0)


def test_check_finds_leaks_and_double_frees() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    with pytest.raises(AssertionError, match="leak"):
        pool.check([])
    with pytest.raises(AssertionError, match="double free"):
        pool.check([[block_id], [block_id]])
    pool.ref_counts[block_id] = 0
    with pytest.raises(AssertionError, match="no or a wrong list"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Tables of blocks beside a pool; `idle` models the LRU."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._evicted)
        self.tables: list[list[int]] = []
        self.idle: list[int] = []
        self.cached: set[int] = set()

    def _evicted(self, block_id: int) -> None:
        assert block_id == self.idle.pop(0), "not the least recently released block was evicted"
        self.cached.remove(block_id)

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            if taken := [self.pool.allocate() for _ in range(self.pool.num_free)]:
                self.tables.append(taken)
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate()
        else:
            self.tables.append([self.pool.allocate() for _ in range(count)])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block_id in table:
            self.pool.share(block_id)
        self.tables.append(table[:])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release_table(table)
        held = {block_id for other in self.tables for block_id in other}
        self.idle += [block_id for block_id in reversed(table) if block_id in self.cached and block_id not in held]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.pool.mark_cached(block_id)
        self.cached.add(block_id)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def find_again(self, data: st.DataObject) -> None:
        block_id = self.idle.pop(data.draw(st.integers(0, len(self.idle) - 1)))
        self.pool.share(block_id)
        self.tables.append([block_id])

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.unmark_cached(block_id)
        self.cached.remove(block_id)
        if block_id in self.idle:
            self.idle.remove(block_id)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            held = {block_id for table in self.tables for block_id in table}
            assert self.pool.num_idle == len(self.idle)
            assert self.pool.num_used == len(held)
            assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
