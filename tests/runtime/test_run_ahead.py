"""A device that computes while the host does its part: steps launched ahead, and the loop's work beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import Driver, make_core, make_request, random_prompts
from device_model import DeviceHashModel
from drafters import PartlyRight

from runtime.engine_core import EngineCore
from runtime.engine_loop import EngineLoop
from runtime.executor import RowSampling, StepBatch
from runtime.messages import AbortRequests, FromEngine, Shutdown, StepOutputs, ToEngine


class EveryRow(DeviceHashModel):
    """Leaves no row to the host, and notes what happens in which order."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.events: list[str] = []

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        self.events.append("launch")
        super().launch(batch, sampling)

    def collect(self):
        self.events.append("collect")
        return super().collect()

    def sample_rows(self, logits, sampling):
        tokens, scores = super().sample_rows(logits, sampling)
        tokens[tokens == -2] = logits[tokens == -2].argmax(axis=1)  # right for greedy rows
        return tokens, scores


def device_of(core: EngineCore) -> DeviceHashModel:
    assert isinstance(core.executor, DeviceHashModel)
    return core.executor


def core_of(executor: DeviceHashModel, **options: Any) -> EngineCore:
    core = make_core(executor.num_blocks, model="device", **options)
    core.executor = core._device = executor
    return core


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3},
        {"num_blocks": 24},
        {"batching": "static"},
        {"scheduling_policy": "priority"},
        {"swap_cached_blocks": True},
        {"swap_cached_blocks": True, "num_blocks": 24},
    ],
    ids=str,
)
def test_every_step_is_the_one_that_the_scheduler_plans(block_size: int, options: dict[str, Any]) -> None:
    """The same requests on a device and on the host, step by step: the same tokens of the same requests in each."""
    options = {"num_blocks": 200, "block_size": block_size, "eos_token_ids": (7,)} | options
    options["num_blocks"] *= 4 // block_size
    drivers = [Driver(make_core(model=model, **options)) for model in ("device", "hash")]
    for i, prompt in enumerate(random_prompts(7, longest=12)):
        for driver in drivers:
            width = 2 if i == 4 else 1
            driver.add(
                make_request(f"r{i}", prompt, greedy=i == 0, max_tokens=3 + 4 * i, n=width, priority=i % 3, seed=i)
                if i
                else make_request("r0", prompt, max_tokens=30)
            )
    ahead = steps = 0
    device, host = drivers
    while host.core.has_work():
        before = [{name: len(answer.deltas) for name, answer in driver.answers.items()} for driver in drivers]
        device.step()
        host.step()
        ahead += device_of(device.core).ahead
        steps += 1
        new = [
            {name: [d.sequences for d in answer.deltas[seen[name] :]] for name, answer in driver.answers.items()}
            for driver, seen in zip(drivers, before, strict=True)
        ]
        assert new[0] == new[1]
    assert not device.core.has_work()
    assert device.core.kv.pool.num_used == 0
    # Where blocks are kept, and each token takes one, only the few steps before the pool is full.
    assert ahead > (0 if "swap_cached_blocks" in options else steps / 5)


def test_all_but_prompts_and_ends_are_launched_ahead() -> None:
    executor = EveryRow(num_blocks=60, block_size=4)
    core = core_of(executor)
    for name in "ab":
        core.add_request(make_request(name, [1, 2, 3], max_tokens=12))
    ahead = []
    while core.has_work():
        core.step()
        ahead.append(executor.ahead)
    # The prompts' step, then decodes: that of the last token is known to be the last, and is followed by nothing.
    assert ahead == [False, *[True] * 10, False]


def test_blocks_that_are_kept_when_they_are_evicted_hold_up_only_who_takes_one() -> None:
    """Idle blocks fill the pool: a step that needs a new block is scheduled, for one must be read off the device."""
    executor = EveryRow(num_blocks=12, block_size=4)
    core = core_of(executor, swap_cached_blocks=True)
    core.add_request(make_request("first", [9] * 20, max_tokens=24))  # leaves ten blocks that the cache knows
    while core.has_work():
        core.step()
    assert core.kv.pool.num_free - core.kv.pool.num_idle == 2
    core.add_request(make_request("a", [1, 2, 3], max_tokens=22))
    ahead = []
    while core.has_work():
        core.step()
        ahead.append(executor.ahead)
    assert core.stats().spilled_blocks > 0
    # The prompt's step, the last one, and each before a step that takes a block another request might come back for.
    assert ahead.count(False) == 2 + 4
    core.check()


@pytest.mark.parametrize("drafted", [True, False])
def test_where_nobody_may_be_drafted_for_steps_are_launched_ahead(drafted: bool) -> None:
    """Speculation that is switched off, or that a request does without, holds nothing up; drafts do."""
    executor = EveryRow(num_blocks=60, block_size=4)
    core = core_of(executor, drafter=PartlyRight(lambda sequence: [], executor.vocab_size))
    core.add_request(make_request("a", [1, 2, 3], max_tokens=12, speculation=None if drafted else False))
    ahead = 0
    while core.has_work():
        core.step()
        ahead += executor.ahead
    assert (ahead == 0) if drafted else (ahead == 10)
    core.set_speculation(False)
    core.add_request(make_request("b", [1, 2, 3], max_tokens=12))
    while core.has_work():
        core.step()
        ahead += executor.ahead
    assert ahead == (10 if drafted else 20)


def test_what_is_aborted_while_its_step_runs_is_gone_at_once() -> None:
    executor = EveryRow(num_blocks=60, block_size=4)
    driver = Driver(core_of(executor))
    driver.add(make_request("a", [1, 2, 3], max_tokens=30))
    driver.add(make_request("b", [4, 5], max_tokens=30))
    driver.add(make_request("n", [4, 6], max_tokens=30, greedy=False, n=2))
    for _ in range(4):
        driver.step()
    assert executor.ahead
    got = len(driver.answers["a"].tokens[0])
    driver.core.abort(["a"], [("n", 0)])
    driver.core.check()
    driver.step()
    assert len(driver.answers["a"].tokens[0]) == got
    assert len(driver.answers["n"].tokens[0]) == got
    assert len(driver.answers["n"].tokens[1]) == got + 1
    while not executor.ahead:
        driver.step()
    driver.core.abort(["b", "n"])
    assert driver.core.has_work(), "the step that runs is still to be collected"
    driver.step()
    assert not executor.ahead
    assert not driver.core.has_work()
    driver.add(make_request("c", [1, 2, 3], max_tokens=30))
    while driver.core.has_work():
        driver.step()
    assert len(driver.answers["c"].tokens[0]) == 30


class Script:
    """A channel that gives what is due at each look, and notes what is sent among the executor's events."""

    def __init__(self, events: list[str], due: Callable[[int], list[ToEngine]]):
        self.events, self._due, self._looks = events, due, 0
        self.deltas: list[Any] = []

    def receive(self, timeout: float) -> list[ToEngine]:
        self._looks += 1
        return self._due(self._looks)

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepOutputs)
        self.events.append("send")
        self.deltas += message.deltas


def test_the_loop_tells_and_listens_beside_the_steps() -> None:
    """Each step's outputs go out, and new requests come in, while the next one runs; others wait for its end."""
    executor = EveryRow(num_blocks=60, block_size=4)
    core = core_of(executor)
    aborted = []
    abort = core.abort
    core.abort = lambda *args: aborted.append(executor.events[-1]) or abort(*args)  # type: ignore[method-assign]

    def due(look: int) -> list[ToEngine]:
        match look:
            case 1:
                return [make_request("a", [1, 2, 3], max_tokens=8), make_request("b", [1, 2], max_tokens=20)]
            case 6:  # beside a step
                late = make_request("late", [5, 6], max_tokens=4)
                again = make_request("b", [8, 9], max_tokens=3)  # of the same name as the one that is to end before
                return [late, AbortRequests(["b"]), again]
            case 8:
                return [Shutdown(drain_s=60)]
        return []

    channel = Script(executor.events, due)
    EngineLoop(core, channel).run()
    tokens: dict[str, list[int]] = {}
    for delta in channel.deltas:
        assert delta.error is None
        tokens.setdefault(delta.request_id, []).extend(t for part in delta.sequences for t in part.new_token_ids)
    assert len(tokens["a"]) == 8
    assert len(tokens["late"]) == 4
    assert 3 < len(tokens["b"]) < 20
    last = next(delta for delta in reversed(channel.deltas) if delta.request_id == "b")
    assert last.finished
    assert aborted == ["collect"], "the abort was to wait for the end of the step"
    events = executor.events
    for at, event in enumerate(events):
        if event == "send" and at < len(events) - 1:
            before = events[:at]
            assert before.count("launch") == before.count("collect") + 1, "outputs are sent while a step runs"
    assert events[-1] == "send"


def test_what_was_to_be_told_is_told_when_a_step_fails() -> None:
    executor = EveryRow(num_blocks=60, block_size=4)
    core = core_of(executor)
    channel = Script(executor.events, lambda look: [make_request("a", [1, 2], max_tokens=8)] if look == 1 else [])

    def fail() -> Any:
        raise RuntimeError("the device is gone")

    launch = executor.launch

    def launch_and_break(batch: StepBatch, sampling: RowSampling | None = None) -> None:
        if executor.events.count("launch") == 3:
            fail()
        launch(batch, sampling)

    executor.launch = launch_and_break  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        EngineLoop(core, channel).run()
    assert sum(len(part.new_token_ids) for delta in channel.deltas for part in delta.sequences) == 2
