"""What goes into a step, who gives way, and that everybody finishes."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from core_driver import Driver, FakeClock, make_core, make_request, random_prompts, run_alone
from hypothesis import given, settings

from runtime.config import EngineConfig
from runtime.errors import PlancastError
from runtime.executor import StepBatch


class Recorder:
    """Keeps every batch that the executor is given."""

    def __init__(self, driver: Driver):
        self.batches: list[StepBatch] = []
        run = driver.core.executor.run

        def recorded(batch: StepBatch):
            self.batches.append(batch)
            return run(batch)

        driver.core.executor.run = recorded  # type: ignore[method-assign]

    def new_tokens(self, step: int = -1) -> list[int]:
        starts = self.batches[step].query_starts
        return (starts[1:] - starts[:-1]).tolist()


def test_decodes_come_first_then_chunks_up_to_the_budget() -> None:
    driver = Driver(make_core(max_num_batched_tokens=16))
    recorder = Recorder(driver)
    driver.add(make_request("a", [1, 2, 3], max_tokens=20))
    driver.step()
    driver.add(make_request("b", list(range(40)), max_tokens=3))
    driver.add(make_request("c", list(range(40, 50)), max_tokens=3))
    for expected in ([1, 15], [1, 15], [1, 10, 5], [1, 1, 5], [1, 1, 1], [1, 1], [1]):
        driver.step()
        assert recorder.new_tokens() == expected
    driver.run()
    assert max(len(batch.token_ids) for batch in recorder.batches) <= 16


def test_rows_of_logits_are_asked_for_only_where_a_token_follows() -> None:
    driver = Driver(make_core(max_prefill_chunk=5))
    recorder = Recorder(driver)
    driver.add(make_request("a", list(range(12)), max_tokens=1))
    driver.run()
    assert [batch.logits_rows.tolist() for batch in recorder.batches] == [[], [], [1]]


def test_a_batch_never_holds_more_sequences_than_allowed() -> None:
    driver = Driver(make_core(300, max_num_seqs=5))
    recorder = Recorder(driver)
    for index in range(6):
        driver.add(make_request(str(index), [index], greedy=False, n=1 + index % 3, max_tokens=9))
    driver.run()
    assert max(len(batch.past_lens) for batch in recorder.batches) == 5


def test_the_last_comer_gives_way_and_the_first_is_never_preempted() -> None:
    driver = Driver(make_core(12, max_num_seqs=4, enable_prefix_caching=False))
    for index in range(4):
        driver.add(make_request(str(index), [index] * 4, max_tokens=30, ignore_eos=True))
    answers = driver.run()
    preemptions = [answers[str(index)].deltas[-1].num_preemptions for index in range(4)]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0
    assert max(preemptions) <= driver.core.config.max_preemptions


@pytest.mark.parametrize("max_preemptions", [0, 1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_protected_request_has_its_worst_case_reserved(max_preemptions: int, mode: str) -> None:
    """Each needs 9 of 14 blocks in the end. Nobody gets what a protected one may still ask for, else it would have to
    give way once more than `max_preemptions` allows."""
    driver = Driver(
        make_core(
            14, max_preemptions=max_preemptions, enable_prefix_caching=False, preemption_mode=mode, swap_space=9999
        )
    )
    requests = [make_request(str(i), [i] * 4, max_tokens=33, ignore_eos=True) for i in range(5)]
    most_reserved = 0
    for request in requests:
        driver.add(request)
    while driver.core.has_work():
        driver.step()
        kv, running = driver.core.kv, driver.core.scheduler.running
        promised = sum(kv.outstanding(request) for request in running if request.protected)
        assert kv.pool.num_free >= promised, "blocks that were promised are gone"
        most_reserved = max(most_reserved, promised)
    preemptions = [driver.answers[request.request_id].deltas[-1].num_preemptions for request in requests]
    assert max(preemptions) == max_preemptions
    assert most_reserved > 0
    for request in requests:
        assert driver.answers[request.request_id].tokens == run_alone(request).tokens


def test_case_15_a_pool_smaller_than_the_batch_preempts_and_ends() -> None:
    prompts = random_prompts(20, longest=30)
    driver = Driver(make_core(18, max_num_seqs=8))
    requests = [make_request(str(i), prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    for request in requests:
        driver.add(request)
    answers = driver.run(max_steps=4 * sum(len(prompt) + 30 for prompt in prompts))
    assert driver.core.stats().preemptions > 0
    for request in requests:
        assert answers[request.request_id].tokens == run_alone(request).tokens


@pytest.mark.parametrize(
    ("prompt_len", "options", "numbers"),
    [
        (30, {"max_tokens": 40}, ["30", "40", "18", "10"]),
        (39, {"max_tokens": 3}, ["39", "3", "11", "10"]),
        (41, {"max_tokens": None}, ["41", "11", "10"]),
        (4, {"max_tokens": 12, "n": 4, "greedy": False}, ["4", "12", "13", "10"]),
    ],
)
def test_case_15_a_request_that_can_never_fit_is_refused_at_once(prompt_len, options, numbers) -> None:
    driver = Driver(make_core(10))
    driver.add(make_request("r", [1] * prompt_len, **options))
    assert driver.core.has_work()
    driver.step()
    answer = driver.answers["r"]
    assert (answer.finished, answer.error_kind) == (True, "request")
    assert answer.error is not None
    assert set(numbers) <= set(re.findall(r"\d+", answer.error))
    assert not driver.core.has_work()
    assert driver.core.kv.pool.num_used == 0


@pytest.mark.parametrize(("prompt_len", "total"), [(1, 41), (20, 41), (40, 41)])
def test_without_max_tokens_a_sequence_goes_to_the_end_of_what_there_is(prompt_len: int, total: int) -> None:
    """Context of 256, and blocks for 40 tokens: the last token is sampled and never stored."""
    driver = Driver(make_core(10))
    driver.add(make_request("r", [1] * prompt_len, max_tokens=None))
    answer = driver.run()["r"]
    assert len(answer.tokens[0]) == total - prompt_len
    assert answer.finish_reasons == {0: "length"}


def test_the_largest_request_that_fits_runs() -> None:
    driver = Driver(make_core(10))
    driver.add(make_request("r", [1] * 20, max_tokens=21, ignore_eos=True))
    assert len(driver.run()["r"].tokens[0]) == 21


def test_case_14_a_preempted_request_of_low_priority_finishes() -> None:
    """An endless stream of urgent requests; the patient one still comes to its end."""
    driver = Driver(make_core(14, max_num_seqs=3, scheduling_policy="priority"))
    patient = make_request("patient", list(range(10)), max_tokens=30, priority=9)
    driver.add(patient)
    for index in range(600):
        if index % 3 == 0:
            driver.add(make_request(str(index), [index % 50] * 6, max_tokens=8, priority=0))
        driver.step()
        if driver.answers["patient"].finished:
            break
    answer = driver.answers["patient"]
    assert answer.finished
    assert answer.deltas[-1].num_preemptions > 0
    assert answer.tokens == run_alone(patient).tokens


def test_an_urgent_request_preempts_a_patient_one_at_once() -> None:
    driver = Driver(make_core(10, max_num_seqs=2, scheduling_policy="priority"))
    driver.add(make_request("low", list(range(16)), max_tokens=20, priority=5))
    driver.step()
    driver.add(make_request("high", list(range(16)), max_tokens=20, priority=1))
    driver.step()
    assert driver.answers["high"].tokens, "it did not wait"
    driver.run()
    assert driver.answers["low"].deltas[-1].num_preemptions == 1


def test_no_preemption_where_it_would_not_help() -> None:
    """The urgent request is too big beside a protected one: nothing is thrown away for nothing."""
    driver = Driver(make_core(12, max_num_seqs=3, scheduling_policy="priority", max_preemptions=0))
    driver.add(make_request("low", list(range(16)), max_tokens=20, priority=5))
    driver.step()
    driver.add(make_request("high", list(range(30)), max_tokens=10, priority=1))
    driver.run()
    assert driver.core.stats().preemptions == 0


def test_priorities_do_nothing_under_fcfs() -> None:
    driver = Driver(make_core(max_num_seqs=1))
    for index in range(3):
        driver.add(make_request(str(index), [1], max_tokens=2, priority=-index))
    order = []
    while driver.core.has_work():
        driver.step()
        order += [name for name, answer in driver.answers.items() if answer.tokens and name not in order]
    assert order == ["0", "1", "2"]


def test_users_share_the_engine() -> None:
    """One user floods the queue; another's few requests do not wait behind all of them."""
    driver = Driver(make_core(max_num_seqs=2))
    for index in range(20):
        driver.add(make_request(f"flood {index}", [index] * 8, max_tokens=6, user="flood"))
    for index in range(3):
        driver.add(make_request(f"few {index}", [index] * 8, max_tokens=6, user="few"))
    finished = []
    while driver.core.has_work():
        driver.step()
        finished += [name for name, answer in driver.answers.items() if answer.finished and name not in finished]
    assert max(finished.index(f"few {index}") for index in range(3)) < 8


def test_static_batching_admits_only_into_an_empty_engine() -> None:
    driver = Driver(make_core(batching="static", max_num_seqs=4, max_num_batched_tokens=64))
    recorder = Recorder(driver)
    for index in range(8):
        driver.add(make_request(str(index), [index] * 4, max_tokens=4 + 2 * (index % 4), ignore_eos=True))
    driver.run()
    sizes = [len(batch.past_lens) for batch in recorder.batches]
    assert sizes == [4, 4, 4, 4, 3, 3, 2, 2, 1, 1] * 2


def test_prefill_chunks_shrink_so_that_tpot_holds() -> None:
    """A step costs 1 ms and 0.1 ms a prefill token: 5 ms of TPOT leave about 35 tokens of the 200."""
    clock = FakeClock()
    driver = Driver(make_core(400, max_num_batched_tokens=200, tpot_slo=0.005, clock=clock, max_context_len=900))
    recorder = Recorder(driver)
    run = driver.core.executor.run

    def timed(batch: StepBatch):
        starts = batch.query_starts
        new = starts[1:] - starts[:-1]
        clock.now += 0.001 + 0.0001 * int(new[new > 1].sum())
        return run(batch)

    driver.core.executor.run = timed  # type: ignore[method-assign]
    driver.add(make_request("a", [1, 2, 3], max_tokens=150, ignore_eos=True))
    for _ in range(3):
        driver.step()
    prompt = [i % 50 for i in range(800)]
    driver.add(make_request("warm up", prompt[:90], max_tokens=2))
    for _ in range(20):
        driver.step()
    warm = len(recorder.batches)
    driver.add(make_request("b", prompt[::-1], max_tokens=2))
    driver.run()
    beside_decodes = [max(recorder.new_tokens(i)) for i in range(warm, len(recorder.batches))]
    chunks = [size for size in beside_decodes if size > 1]
    assert sum(chunks) == 800
    assert all(25 <= size <= 36 for size in chunks[:-1])
    assert driver.core.stats().requests_in_slo == 3


def test_queue_limits_and_timeouts() -> None:
    clock = FakeClock()
    driver = Driver(make_core(max_num_seqs=1, max_num_waiting=2, queue_timeout=5.0, clock=clock))
    for name in "abcd":
        driver.add(make_request(name, [1, 2, 3], max_tokens=30, arrival_time=clock.now))
        if name == "a":
            driver.step()
    driver.step()
    refused = driver.answers["d"]
    assert (refused.finished, refused.error_kind) == (True, "overloaded")
    assert refused.error is not None
    assert "2 requests are waiting" in refused.error
    clock.now += 6.0
    driver.step()
    for name in "bc":
        late = driver.answers[name]
        assert (late.finished, late.error_kind) == (True, "queue_timeout")
        assert late.error is not None
        assert "6.0 s" in late.error
        assert "5 s" in late.error
    driver.run()
    assert driver.answers["a"].finish_reasons == {0: "length"}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_request_finishes_within_a_bound_of_steps(data: st.DataObject) -> None:
    """A step computes at least one token of somebody, and each token is computed at most max_preemptions + 1 times."""
    policy = data.draw(st.sampled_from(["fcfs", "priority"]))
    max_preemptions = data.draw(st.integers(0, 4))
    num_blocks = data.draw(st.integers(8, 20))
    driver = Driver(
        make_core(num_blocks, scheduling_policy=policy, max_preemptions=max_preemptions, max_num_batched_tokens=8)
    )
    bound = 0
    for index in range(data.draw(st.integers(1, 12))):
        prompt_len, max_tokens = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 17))
        priority = data.draw(st.integers(0, 3))
        driver.add(make_request(str(index), [index] * prompt_len, max_tokens=max_tokens, priority=priority))
        bound += (max_preemptions + 1) * (prompt_len + max_tokens) + max_preemptions
        for _ in range(data.draw(st.integers(0, 6))):
            driver.step()
    answers = driver.run(max_steps=bound)
    assert all(answer.finished and answer.error is None for answer in answers.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "one token of each sequence"),
        ({"max_context_len": "4k"}, "max_context_len is '4k'"),
        ({"scheduling_policy": "random"}, "choose one of fcfs, priority"),
        ({"queue_timeout": 0.0}, "queue_timeout is 0.0"),
        ({"kv_cache_memory_share": 1.5}, r"share in \(0, 1\]"),
        ({"num_blocks": True}, "num_blocks is True"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(PlancastError, match=message):
        EngineConfig(**{"max_context_len": 64} | options)
