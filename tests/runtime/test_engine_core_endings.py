"""How a request ends in the engine core: stop tokens, aborts, a core that died, refusals, broken logits."""

from __future__ import annotations

import numpy as np
import pytest
from core_driver import Driver, make_core, make_request, run_alone

from runtime.errors import GenerationError
from runtime.server.errors import Dialect, to_api_error


def test_stop_tokens_and_eos() -> None:
    free = run_alone(make_request("r", [5, 6], max_tokens=20))
    tokens = free.tokens[0]
    eos, stop = tokens[9], tokens[4]
    first_eos, first_stop = tokens.index(eos), tokens.index(stop)
    for options, expected, reason in (
        ({}, tokens[: first_eos + 1], ("stop", None)),
        ({"ignore_eos": True}, tokens, ("length", None)),
        ({"stop_token_ids": [stop]}, tokens[: first_stop + 1], ("stop", stop)),
    ):
        answer = run_alone(make_request("r", [5, 6], max_tokens=20, **options), eos_token_ids=(eos,))
        assert answer.tokens == {0: expected}
        assert (answer.finish_reasons[0], answer.stop_reasons[0]) == reason


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "decoding", "preempted", "swapped out"])
def test_case_13_abort_frees_everything_at_once(when: str) -> None:
    options: dict = {"max_prefill_chunk": 4}
    if when in ("preempted", "swapped out"):
        options |= {"num_blocks": 12, "max_num_seqs": 4}
    if when == "swapped out":
        options |= {"preemption_mode": "swap"}
    if when == "waiting":
        options |= {"max_num_seqs": 1}
    driver = Driver(make_core(**options))
    driver.add(make_request("other", [9] * 5, max_tokens=35))
    driver.step()
    driver.add(make_request("r", list(range(12)), max_tokens=20))
    core = driver.core
    for _ in range({"waiting": 2, "in its prompt": 2, "decoding": 8}.get(when, 60)):
        driver.step()
        request = core.requests["r"]
        if request.num_preemptions and request in core.scheduler.waiting.requests():
            break
    assert (core.requests["r"].num_preemptions > 0) == (when in ("preempted", "swapped out"))
    core.abort(["r", "nobody"])
    core.check()
    other = core.requests["other"].live[0]
    assert core.kv.pool.num_used == len(other.block_ids)
    if core.scheduler.swap is not None:
        assert core.scheduler.swap.num_used == 0
    said = len(driver.answers["r"].deltas)
    driver.run()
    assert len(driver.answers["r"].deltas) == said, "nothing more is said of an aborted request"
    assert core.stats().requests_aborted == 1
    assert driver.answers["other"].tokens == run_alone(make_request("other", [9] * 5, max_tokens=35)).tokens


def test_one_of_n_sequences_can_be_stopped() -> None:
    request = make_request("r", list(range(9)), greedy=False, n=3, max_tokens=10)
    driver = Driver(make_core())
    driver.add(request)
    for _ in range(4):
        driver.step()
    driver.core.abort([], [("r", 1), ("r", 7), ("nobody", 0)])
    driver.core.check()
    answer, alone = driver.run()["r"], run_alone(request)
    assert answer.tokens[1] == alone.tokens[1][:4]
    assert (answer.tokens[0], answer.tokens[2]) == (alone.tokens[0], alone.tokens[2])
    assert answer.finished
    assert 1 not in answer.finish_reasons, "the client knows: it stopped it"


@pytest.mark.parametrize("delivered", [1, 5, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_resume_goes_on_where_the_last_core_died(n: int, delivered: int) -> None:
    request = make_request("r", list(range(9)), greedy=False, n=n, max_tokens=10, min_tokens=3, presence_penalty=0.5)
    alone = run_alone(request)
    driver = Driver(make_core(num_blocks=20))
    request.resume_token_ids = [alone.tokens[index][: delivered - (index == 1)] for index in range(n)]
    if n == 3:
        request.resume_finished = [2]
    driver.add(request)
    answer = driver.run()["r"]
    for index in range(n):
        if index not in request.resume_finished:
            assert request.resume_token_ids[index] + answer.tokens[index] == alone.tokens[index]
        else:
            assert index not in answer.tokens
    assert answer.finished


def test_resume_of_what_was_already_over_says_so_and_computes_nothing() -> None:
    request = make_request("r", [1, 2, 3], max_tokens=4, ignore_eos=True)
    request.resume_token_ids = [run_alone(request).tokens[0]]
    driver = Driver(make_core())
    driver.add(request)
    answer = driver.run()["r"]
    assert (answer.tokens, answer.finish_reasons, answer.finished) == ({0: []}, {0: "length"}, True)
    assert driver.core.executor.steps == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "empty"),
        ([50], {}, "token id 50"),
        ([-1], {}, "token id -1"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1] * 200, {"max_tokens": 57}, "256"),
        ([1] * 256, {"max_tokens": None}, "256"),
        ([1], {"greedy": False, "temperature": float("nan")}, "temperature"),
        ([1], {"greedy": False, "n": 9}, "at most 8 sequences"),
        ([1], {"beam_width": 9, "n": 2}, "at most 8 sequences"),
        ([1], {"resume_token_ids": [[3] * 20]}, "delivered"),
        ([1], {"resume_token_ids": [[99]]}, "vocabulary"),
        ([1], {"structured_outputs": {"json_object": True}}, "structured output"),
        ([1], {"bad_words_token_ids": 5}, "bad_words_token_ids"),
        ([1], {"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
        ([1], {"bad_words_token_ids": [[1, 99]]}, "99"),
        ([1], {"resume_token_ids": [[None]]}, "cannot be read"),
    ],
)
def test_bad_requests_are_answered_and_the_engine_lives(prompt: list[int], options: dict, words: str) -> None:
    driver = Driver(make_core())
    driver.add(make_request("good", [1, 2, 3], max_tokens=5))
    driver.add(make_request("bad", prompt, **options))
    answers = driver.run()
    assert answers["bad"].error_kind == "request"
    assert words in (answers["bad"].error or "")
    assert answers["good"].tokens == run_alone(make_request("good", [1, 2, 3], max_tokens=5)).tokens


def test_a_request_id_in_use_is_refused() -> None:
    driver = Driver(make_core())
    driver.core.add_request(make_request("r", [1, 2], max_tokens=5))
    driver.core.add_request(make_request("r", [3, 4], max_tokens=5))
    outputs = driver.core.step().deltas
    errors = [delta.error for delta in outputs if delta.error]
    assert errors == ["request id 'r' is in use: ids must be unique"]
    assert [part.new_token_ids for delta in outputs for part in delta.sequences]


@pytest.mark.parametrize(
    "options",
    [
        {"greedy": False, "n": 3},
        {"beam_width": 3},
        {"prompt_logprobs": 1, "allowed_token_ids": [3]},
        {"logprobs": 1, "allowed_token_ids": [3]},
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_only_their_request(options: dict, bad: float) -> None:
    """It is the engine's fault and no other's: kind "generation", which is no 400."""
    driver = Driver(make_core())
    run = driver.core.executor.run

    def poisoned(batch):
        logits = run(batch)
        for row, position in enumerate(batch.logits_rows):
            if batch.token_ids[position] == 13:
                logits[row, 7] = bad
        return logits

    driver.core.executor.run = poisoned  # type: ignore[method-assign]
    driver.add(make_request("good", [1, 2], greedy=False, n=2, max_tokens=5))
    driver.add(make_request("bad", [2, 13, 4, 13], max_tokens=5, **options))
    answers = driver.run()
    assert answers["bad"].error_kind == "generation"
    assert "not finite" in (answers["bad"].error or "")
    assert answers["good"].finished
    assert answers["good"].error is None
    assert driver.core.kv.pool.num_used == 0
    assert to_api_error(GenerationError(answers["bad"].error)).status(Dialect.OPENAI) == 500
