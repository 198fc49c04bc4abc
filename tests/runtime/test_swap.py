"""The host swap tier: slots, the file, and preempted sequences that come back from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_driver import Driver, make_core, make_request, random_prompts, run_alone

from runtime.errors import PlancastError
from runtime.swap import SwapFile, SwapSlots


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
