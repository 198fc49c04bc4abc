"""Rows that a device samples: the core's answers are those of the host's sampler, whatever falls back to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_driver import Answer, Driver, make_request
from drafters import ANY_DRAFTS, DrawnFromTable, PartlyRight
from tiny_model import HashModelExecutor

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

from device_model import DeviceHashModel, KernelDevice

from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.executor import DeviceExecutor

VOCAB = 300


def answers(
    executor_class, requests, *, drafter=None, vocab_size: int = VOCAB, **options
) -> tuple[dict[str, Answer], HashModelExecutor]:
    executor = executor_class(vocab_size, num_blocks=200)
    config: dict[str, Any] = {"max_context_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32} | options
    if drafter is not None:
        config["speculation"] = ANY_DRAFTS
    driver = Driver(EngineCore(executor, EngineConfig(**config), draft_engine=drafter))
    for request in requests:
        driver.add(request)
    return driver.run(), executor


def check_equal(device: dict[str, Answer], host: dict[str, Answer]) -> None:
    for name, expected in host.items():
        got = device[name]
        assert (got.tokens, got.finish_reasons, got.error) == (
            expected.tokens,
            expected.finish_reasons,
            expected.error,
        ), name
        for index, entries in expected.logprobs.items():
            for mine, theirs in zip(got.logprobs[index], entries, strict=True):
                assert (mine.token_ids, mine.ranks) == (theirs.token_ids, theirs.ranks), name
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
        for index, total in expected.cumulative.items():
            assert got.cumulative[index] == (None if total is None else pytest.approx(total, abs=1e-4)), name


def prompt(seed: int, length: int = 6) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


SAMPLED = {  # of each row the device gives the token
    "greedy": {"temperature": 0.0},
    "unrestricted": {"temperature": 0.7},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "top_p": {"temperature": 0.3, "top_p": 0.8},
    "min_p": {"temperature": 1.1, "min_p": 0.4},
    "all": {"temperature": 1.2, "top_k": 60, "top_p": 0.9, "min_p": 0.05},
    "logprobs": {"temperature": 0.8, "top_k": 9, "logprobs": 5},
    "one logprob": {"temperature": 0.0, "logprobs": 0},
    "stop": {"temperature": 1.0, "stop_token_ids": list(range(0, VOCAB, 7)), "max_tokens": 40},
}
HOSTED = {  # of none
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bias": {"temperature": 0.0, "logit_bias": {5: 3.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": list(range(0, VOCAB, 3))},
    "typical": {"temperature": 1.0, "typical_p": 0.6},
    "many logprobs": {"temperature": 0.7, "logprobs": 6},
    "all logprobs": {"temperature": 0.7, "logprobs": -1},
    "beams": {"temperature": 0.0, "beam_width": 3, "n": 2},
    "wide top_p": {"temperature": 3.0, "top_p": 0.97},
    "wide top_k": {"temperature": 1.0, "top_k": 200},
}
MIXED = {
    "prompt logprobs": {"temperature": 0.9, "prompt_logprobs": 2, "logprobs": 2},
    "several": {"temperature": 0.9, "n": 3, "top_k": 30},
    "best of": {"temperature": 0.9, "n": 1, "best_of": 3},
    # Some rows leave more than 128 candidates and some do not.
    "on the edge": {"temperature": 2.0, "top_p": 0.834, "max_tokens": 16},
}


def requests_of(cases: dict[str, dict]):
    return [
        make_request(name, prompt(i), greedy=False, seed=i, **{"max_tokens": 6} | case)
        for i, (name, case) in enumerate(cases.items())
    ]


def test_answers_are_those_of_the_host() -> None:
    """All kinds of requests side by side: rows of one step are sampled here and there."""
    requests = requests_of(SAMPLED | HOSTED | MIXED)
    device, executor = answers(KernelDevice, requests)
    assert isinstance(executor, DeviceExecutor)
    assert not isinstance(HashModelExecutor(), DeviceExecutor)
    host, _ = answers(HashModelExecutor, requests)
    check_equal(device, host)
    assert all(answer.error is None for answer in host.values())


@pytest.mark.parametrize("name", [*SAMPLED, *HOSTED, *MIXED])
def test_what_the_device_samples(name: str) -> None:
    cases = SAMPLED | HOSTED | MIXED
    device, executor = answers(KernelDevice, requests_of({name: cases[name]}))
    assert isinstance(executor, KernelDevice)
    total = sum(len(tokens) for tokens in device[name].tokens.values())
    if name in SAMPLED:
        assert executor.sampled == executor.asked == total
    elif name in HOSTED:
        assert executor.sampled == 0
        assert executor.asked == (total if name.startswith("wide") else 0)
    else:
        assert 0 < executor.sampled < total


def test_drafts_that_are_certain() -> None:
    """They are verified by tokens that the device samples at each of their rows."""
    cases = {name: SAMPLED[name] for name in ("greedy", "unrestricted", "top_k", "logprobs", "stop")}
    requests = requests_of(cases | {"wide top_p": HOSTED["wide top_p"], "penalties": HOSTED["penalties"]})
    host, _ = answers(HashModelExecutor, requests)
    truth = {name: answer.tokens[0] for name, answer in host.items()}
    drafter = PartlyRight(lambda sequence: truth[sequence.request.request_id], VOCAB)
    device, executor = answers(KernelDevice, requests, drafter=drafter)
    check_equal(device, host)
    assert isinstance(executor, KernelDevice)
    assert executor.sampled > 0


DRAFTED = {name: SAMPLED[name] for name in ("greedy", "unrestricted", "top_p", "all", "logprobs")}


def drafters(spread: int) -> list[DrawnFromTable]:
    """Two that draw the same: each token is followed by one of so many."""
    rng = np.random.default_rng(3)
    table = np.zeros((VOCAB, VOCAB))
    for row in table:
        row[rng.choice(VOCAB, spread, replace=False)] = rng.dirichlet(np.ones(spread))
    return [DrawnFromTable(table) for _ in range(2)]


@pytest.mark.parametrize(("spread", "sampled"), [(40, "all"), (VOCAB, "some")])
def test_drafts_that_were_drawn_are_verified_on_the_device(spread: int, sampled: str) -> None:
    """Tokens alone come back, but of requests that the host must sample and of drafts that do not fit: a step may name
    4000 tokens here, thirteen distributions over all the vocabulary."""
    ours, theirs = drafters(spread)
    few = {name: DRAFTED[name] for name in ("unrestricted", "logprobs")} | {"penalties": HOSTED["penalties"]}
    requests = requests_of(DRAFTED if sampled == "all" else few)
    host, _ = answers(HashModelExecutor, requests, drafter=theirs)
    device, executor = answers(KernelDevice, requests, drafter=ours)
    check_equal(device, host)
    assert isinstance(executor, KernelDevice)
    assert executor.verified > 0
    assert executor.sampled == executor.asked
    assert (executor.hosted == 0) is (sampled == "all")


def test_a_device_that_verifies_nothing() -> None:
    """Drafts that were drawn come as logits, all others as tokens."""
    ours, theirs = drafters(40)
    requests = requests_of(DRAFTED)
    host, _ = answers(HashModelExecutor, requests, drafter=theirs)
    device, executor = answers(Verifyless, requests, drafter=ours)
    check_equal(device, host)
    assert isinstance(executor, KernelDevice)
    assert executor.verified == 0 < executor.hosted


def test_what_the_device_leaves_of_a_draft_the_host_finishes() -> None:
    """Every fifth position of a sequence, by the runtime's own arithmetic."""
    ours, theirs = drafters(60)
    requests = requests_of(DRAFTED | {"wide top_p": HOSTED["wide top_p"]})
    host, _ = answers(HashModelExecutor, requests, drafter=theirs)
    device, executor = answers(DeviceHashModel, requests, drafter=ours)
    check_equal(device, host)
    assert isinstance(executor, DeviceHashModel)
    assert 0 < executor.sampled < executor.asked


def test_broken_logits_end_a_drafted_request_as_on_the_host() -> None:
    ours, theirs = drafters(40)
    requests = requests_of({name: DRAFTED[name] for name in ("greedy", "unrestricted")})
    host, _ = answers(Broken, requests, drafter=theirs)
    device, _ = answers(BrokenDevice, requests, drafter=ours)
    check_equal(device, host)
    assert all("not finite" in (answer.error or "") for answer in device.values())


class Broken(HashModelExecutor):
    """From the third token on, logits that are no numbers."""

    def logits_after(self, history) -> np.ndarray:
        logits = super().logits_after(history)
        if len(history) > 8:
            logits[7] = np.nan
        return logits


class BrokenDevice(KernelDevice, Broken):
    pass


def test_logits_that_are_not_finite_end_the_request_as_on_the_host() -> None:
    requests = requests_of({name: SAMPLED[name] for name in ("greedy", "unrestricted", "top_p", "logprobs")})
    device, _ = answers(BrokenDevice, requests)
    host, _ = answers(Broken, requests)
    check_equal(device, host)
    assert all("not finite" in (answer.error or "") for answer in device.values())


class Sampleless(KernelDevice):
    max_top_logprobs = None


class Verifyless(KernelDevice):
    max_draft_entries = 0


def test_a_device_that_does_not_sample() -> None:
    requests = requests_of({"all": SAMPLED["all"]})
    device, executor = answers(Sampleless, requests)
    host, _ = answers(HashModelExecutor, requests)
    check_equal(device, host)
    assert isinstance(executor, KernelDevice)
    assert executor.asked == 0
