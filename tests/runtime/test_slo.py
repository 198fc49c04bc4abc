"""The step-time model finds what a step costs, and goodput counts who was served in time."""

from __future__ import annotations

import random

import pytest
from core_driver import Driver, FakeClock, make_core, make_request

from runtime.scheduling.slo import StepTimeModel


def trained(noise: float = 0.0, steps: int = 300, seed: int = 0) -> StepTimeModel:
    """A model that saw steps of 4 ms + 0.2 ms a decode + 0.05 ms a prefill token."""
    rng, model = random.Random(seed), StepTimeModel()
    for _ in range(steps):
        decodes, tokens = rng.randrange(17), rng.choice([0, 0, rng.randrange(512)])
        seconds = 0.004 + 0.0002 * decodes + 0.00005 * tokens
        model.observe(decodes, tokens, seconds * rng.uniform(1 - noise, 1 + noise))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_costs_are_found(noise: float) -> None:
    model = trained(noise)
    assert model.base == pytest.approx(0.004, rel=0.02 + noise)
    assert model.per_token == pytest.approx(0.00005, rel=0.02 + noise)
    assert model.predict(16, 256) == pytest.approx(0.02, rel=0.02 + noise / 2)


def test_the_budget_keeps_a_step_within_the_limit() -> None:
    model = trained(0.1)
    for limit in (0.01, 0.012, 0.03):
        budget = model.prefill_budget(8, limit, most=4096, least=32)
        assert model.predict(8, budget) <= limit
        assert budget > 32
    assert model.prefill_budget(8, 0.001, most=512, least=32) == 32, "prefills never stand still"
    assert model.prefill_budget(8, 10.0, most=512, least=32) == 512
    assert StepTimeModel().prefill_budget(8, 0.01, most=512, least=32) == 128, "careful while it knows nothing"


def test_an_outlier_is_ignored_and_a_change_is_learnt() -> None:
    model = trained()
    before = model.predict(8, 128)
    model.observe(8, 128, 5.0)
    assert model.predict(8, 128) == before
    for _ in range(400):
        model.observe(8, 128, 0.2)
    assert model.predict(8, 128) == pytest.approx(0.2, rel=0.2)


def test_steps_of_one_kind_alone_do_no_harm() -> None:
    model = StepTimeModel()
    for _ in range(1000):
        model.observe(4, 0, 0.01)
    assert model.predict(4, 0) == pytest.approx(0.01, rel=0.01)
    assert model.per_token == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("ttft", "tpot", "good"), [(None, None, 2), (0.035, None, 1), (None, 0.015, 2), (None, 0.005, 0), (1.0, 1.0, 2)]
)
def test_goodput_counts_requests_that_met_both_limits(ttft: float | None, tpot: float | None, good: int) -> None:
    """Steps of 10 ms: the first request's first token comes after 10 ms, the second's, which waits, after 60 ms."""
    clock = FakeClock()
    driver = Driver(make_core(max_num_seqs=1, ttft_slo=ttft, tpot_slo=tpot, clock=clock))
    run = driver.core.executor.run

    def timed(batch):
        clock.now += 0.01
        return run(batch)

    driver.core.executor.run = timed  # type: ignore[method-assign]
    for name in "ab":
        driver.add(make_request(name, [1, 2], max_tokens=5, ignore_eos=True, arrival_time=clock.now))
    driver.run()
    stats = driver.core.stats()
    assert (stats.requests_finished, stats.requests_in_slo, stats.tokens_in_slo) == (2, good, 5 * good)
