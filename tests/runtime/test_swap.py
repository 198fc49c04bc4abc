"""The host swap tier: slots, the file, and preempted sequences that come back from it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from core_driver import Driver, make_core, make_request, random_prompts, run_alone

from runtime.errors import PlancastError
from runtime.prefix_cache import CachedBlock
from runtime.scheduling.spill import SpillTier
from runtime.swap import SwapFile, SwapMove, SwapSlots


def test_slots_are_handed_out_once_and_reused_first() -> None:
    slots = SwapSlots(4)
    first = slots.allocate(3)
    assert first == [0, 1, 2]
    assert slots.allocate(2) is None
    slots.free(1)
    assert slots.allocate(2) == [1, 3]
    slots.check({0, 1, 2, 3})
    with pytest.raises(AssertionError, match="expected"):
        slots.check({0})
    slots.free(0)
    with pytest.raises(ValueError, match="slot 0 is not in use"):
        slots.free(0)


def test_a_file_keeps_each_slot_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = SwapFile(8, 16, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "unlinked at once: a crash cannot leave it behind"
    for slot in (7, 0, 3):
        file.write(slot, bytes([slot]) * 16)
    assert [file.read(slot)[0] for slot in (0, 3, 7)] == [0, 3, 7]
    with pytest.raises(ValueError, match="15 bytes"):
        file.write(1, bytes(15))
    file.close()
    file.close()


def test_a_file_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match="swap_folder"):
        SwapFile(8, 16, str(tmp_path / "absent"))
    with pytest.raises(PlancastError, match=r"bytes are free.*swap_space"):
        SwapFile(1 << 40, 1 << 20, str(tmp_path))


@pytest.mark.parametrize("model", ["hash", "tiny"])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_sequences_go_on_without_recomputing(model: str, caching: bool) -> None:
    """Every prompt and output token goes through the model once, however often its request was preempted."""
    prompts = random_prompts(8, longest=20)
    driver = Driver(
        make_core(20, model=model, preemption_mode="swap", swap_space=1 << 22, enable_prefix_caching=caching)
    )
    computed = 0
    run = driver.core.executor.run

    def counted(batch):
        nonlocal computed
        computed += len(batch.token_ids)
        return run(batch)

    driver.core.executor.run = counted  # type: ignore[method-assign]
    requests = [make_request(str(i), prompt, max_tokens=25, ignore_eos=True) for i, prompt in enumerate(prompts)]
    for request in requests:
        driver.add(request)
    answers = driver.run()
    stats = driver.core.stats()
    assert stats.preemptions > 0
    assert stats.swapped_in_blocks == stats.swapped_out_blocks > 0
    cached = sum(answer.deltas[0].num_cached_tokens for answer in answers.values())
    assert computed == sum(len(prompt) + 24 for prompt in prompts) - cached
    for request in requests:
        assert answers[request.request_id].tokens == run_alone(request, model=model).tokens
    driver.core.close()


def test_shared_blocks_are_swapped_once() -> None:
    """n = 3: the prompt's blocks take one slot each, and are shared again when they come back."""
    driver = Driver(make_core(19, preemption_mode="swap", swap_space=1 << 22, enable_prefix_caching=False))
    core = driver.core
    first = make_request("first", [5] * 8, max_tokens=60, ignore_eos=True)
    second = make_request("second", list(range(16)), greedy=False, n=3, max_tokens=20, ignore_eos=True)
    driver.add(first)
    driver.step()
    driver.add(second)
    while not core.requests["second"].swapped:
        driver.step()
    swapped = core.requests["second"].swapped
    assert swapped is not None
    slots = [list(table) for _, table in swapped]
    assert len(slots) == 3
    assert slots[0][:4] == slots[1][:4] == slots[2][:4]
    assert len({slot for table in slots for slot in table}) == core.scheduler.swap.num_used == sum(map(len, slots)) - 8  # type: ignore[union-attr]
    answers = driver.run()
    for request in (first, second):
        assert answers[request.request_id].tokens == run_alone(request).tokens


def evict_all(driver: Driver, times: int) -> None:
    """Run unlike prompts until nothing of what was cached before is in the pool."""
    for i in range(times):
        driver.add(make_request(f"flood {i}", [40 + i] * 40, max_tokens=2))
        driver.run()


@pytest.mark.parametrize("model", ["hash", "tiny"])
def test_evicted_cached_blocks_come_back_from_the_file(model: str) -> None:
    """A prompt whose blocks were all evicted is not computed again; without the tier it is."""
    prompt = [*range(30), 7]
    for spilling in (True, False):
        driver = Driver(make_core(16, model=model, swap_cached_blocks=spilling, swap_space=1 << 20))
        driver.add(make_request("first", prompt, max_tokens=6))
        driver.run()
        evict_all(driver, 3)
        second = make_request("second", prompt, max_tokens=6)
        driver.add(second)
        answer = driver.run()["second"]
        assert answer.deltas[0].num_cached_tokens == (28 if spilling else 0)
        assert answer.tokens == run_alone(second, model=model).tokens
        stats = driver.core.stats()
        assert stats.restored_blocks == (7 if spilling else 0)
        assert (stats.spilled_blocks > 7) == (stats.num_spilled_blocks > 0) == spilling
        assert driver.core.reset_prefix_cache() == stats.num_cached_blocks + stats.num_spilled_blocks
        driver.core.check()
        third = make_request("third", prompt, max_tokens=6)
        driver.add(third)
        assert driver.run()["third"].deltas[0].num_cached_tokens == 0, "reset forgets the spilled ones too"
        driver.core.close()


def test_two_requests_share_what_one_brought_back() -> None:
    driver = Driver(make_core(24, swap_cached_blocks=True, swap_space=1 << 20))
    prompt = list(range(24))
    driver.add(make_request("first", prompt, max_tokens=2))
    driver.run()
    evict_all(driver, 4)
    before = driver.core.stats().restored_blocks
    requests = [make_request(f"r{i}", [*prompt, i], greedy=False, n=2, max_tokens=4) for i in range(2)]
    for request in requests:
        driver.add(request)
    driver.step()
    assert driver.core.stats().restored_blocks == before + 6
    answers = driver.run()
    for request in requests:
        assert answers[request.request_id].tokens == run_alone(request).tokens


def test_the_tier_is_bounded_and_drops_the_oldest() -> None:
    moves: list[SwapMove] = []
    tier = SpillTier(SwapSlots(2), moves)
    nodes = [CachedBlock(bytes([i]), b"", None, -1) for i in range(3)]
    for block_id, node in enumerate(nodes):
        tier.add(node, 10 + block_id)
    assert moves == [SwapMove(True, 10, 0), SwapMove(True, 11, 1), SwapMove(True, 12, 0)]
    assert [tier.find(node.digest) is node for node in nodes] == [False, True, True]
    slot = tier.take(nodes[1])
    tier.restore(slot, 5)
    assert moves[-1] == SwapMove(False, 5, 1)
    assert (len(tier), tier.held_slots(), tier.slots.num_free) == (1, {0}, 1)
    tier.discard(nodes[2].digest)
    tier.discard(nodes[2].digest)
    tier.slots.check(set())


def test_preempted_sequences_have_the_first_right_to_the_space() -> None:
    slots = SwapSlots(4)
    tier = SpillTier(slots, [])
    for i in range(4):
        tier.add(CachedBlock(bytes([i]), b"", None, -1), i)
    tier.make_room(3)
    assert slots.allocate(3) is not None
    tier.add(CachedBlock(b"x", b"", None, -1), 9)
    assert tier.find(b"x") is not None
    tier.make_room(1)
    assert slots.allocate(1) is not None
    tier.add(CachedBlock(b"y", b"", None, -1), 9)
    assert len(tier) == 0, "no slot is left: the block is lost"


def test_a_spilled_block_with_the_same_digest_and_other_tokens_is_no_hit() -> None:
    """With a digest that tells nothing apart, tokens and ancestors are compared all the same."""
    driver = Driver(make_core(10, swap_cached_blocks=True, swap_space=1 << 20))
    assert driver.core.kv.cache is not None
    driver.core.kv.cache._digest = lambda data: bytes([sum(data) % 23])
    prompts = random_prompts(30, longest=30)
    for i, prompt in enumerate(prompt for pair in pairwise(prompts) for prompt in pair[::-1]):
        request = make_request(str(i), prompt, max_tokens=4)
        driver.add(request)
        assert driver.run()[request.request_id].tokens == run_alone(request).tokens
    assert driver.core.stats().restored_blocks > 0
