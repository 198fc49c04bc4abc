"""A head's slots keep step with the target: a wrong one is an AssertionError, or shows as a draft that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from core_driver import Driver, make_core, make_request, run_alone
from drafted_runs import DRAFTED_REQUESTS, TARGET_OPTIONS, draft_figures, drive_drafts
from drafters import ANY_DRAFTS, hash_head_engine

from runtime.errors import PlancastError
from runtime.speculation.config import parse_speculation
from runtime.speculation.speculator import Speculator


def drive(requests: list[Any], *, right: float = 1.0, draft: dict[str, Any] | None = None, **options: Any) -> Driver:
    """Run requests with a head; every answer must be that of the request alone."""
    drafter = hash_head_engine(right=right, **draft or {})
    driver = drive_drafts(requests, drafter, model="with_head", **options)
    assert not drafter._feeds
    return driver


def test_a_head_that_knows_the_target_is_always_accepted() -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS))
    assert drafted == accepted > 50


def test_refused_tokens_are_fed_again() -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, right=0.8))
    assert 0.3 * drafted < accepted < drafted


@pytest.mark.parametrize("options", TARGET_OPTIONS, ids=str)
def test_in_step_whatever_the_target_does(options: dict[str, Any]) -> None:
    for right in (1.0, 0.7):
        drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, right=right, **options))
        assert drafted >= accepted > 0
        assert right < 1.0 or drafted == accepted


def test_few_blocks_drop_the_mirror_not_the_request() -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, draft={"num_blocks": 12}))
    assert drafted == accepted > 0


def test_beyond_the_heads_context_nothing_is_drafted() -> None:
    drafted, accepted = draft_figures(
        drive([make_request("r", [1, 2, 3], max_tokens=60)], draft={"max_context_len": 20})
    )
    assert 0 < drafted == accepted < 25


def test_a_cached_prompt_and_forks() -> None:
    requests = [
        make_request("a", list(range(20)), max_tokens=10),
        make_request("n", list(range(20)), greedy=False, n=3, seed=1, temperature=0.4, max_tokens=20),
        make_request("bias", [4, 1], logit_bias={7: 20.0}, max_tokens=20),
    ]
    drafted, accepted = draft_figures(drive(requests))
    assert accepted > 0.2 * drafted


def test_drawn_drafts() -> None:
    request = make_request("r", [1, 2, 3], greedy=False, seed=3, temperature=0.8, max_tokens=40)
    driver = Driver(make_core(model="with_head", drafter=hash_head_engine(drawn=True)))
    driver.add(request)
    driver.run()
    drafted, accepted = draft_figures(driver)
    assert drafted == accepted > 20  # drawn from the target's own distribution


def test_switched_off_and_on_again_a_mirror_begins_anew() -> None:
    drafter = hash_head_engine()
    driver = Driver(make_core(model="with_head", drafter=drafter))
    request = make_request("r", [1, 2, 3], max_tokens=200)
    driver.add(request)
    for _ in range(5):
        driver.step()
    driver.core.set_speculation(False)
    for _ in range(7):
        driver.step()
    driver.core.set_speculation(True)
    driver.run()
    assert driver.answers["r"].tokens == run_alone(request).tokens
    drafted, accepted = draft_figures(driver)
    assert drafted == accepted > 100


def test_feed_that_nobody_takes_is_dropped() -> None:
    """A request that drafts nothing for long keeps little, and drafts right when it does again."""
    drafter = hash_head_engine()
    driver = Driver(make_core(model="with_head", drafter=drafter))
    request = make_request("r", [1, 2, 3], max_tokens=180)
    driver.add(request)
    speculator = driver.core.speculator
    assert isinstance(speculator, Speculator)
    speculator.lengths.max_length = 0
    for _ in range(100):
        driver.step()
    (feed,) = drafter._feeds.values()
    assert 0 < feed.num_waiting <= 64
    speculator.lengths.max_length = ANY_DRAFTS.num_speculative_tokens
    driver.run()
    assert driver.answers["r"].tokens == run_alone(request).tokens
    drafted, accepted = draft_figures(driver)
    assert drafted == accepted > 30


def test_an_abort_frees_the_mirror() -> None:
    drafter = hash_head_engine()
    driver = Driver(make_core(model="with_head", drafter=drafter))
    driver.add(make_request("r", [1, 2, 3], max_tokens=100))
    for _ in range(5):
        driver.step()
    assert drafter.kv.pool.num_used > 0
    driver.core.abort(["r"])
    assert drafter.kv.pool.num_used == 0
    assert not drafter._feeds


def test_one_engine_drafts() -> None:
    with pytest.raises(PlancastError, match="names draft_model and eagle"):
        parse_speculation({"method": "eagle+draft_model", "model": "x"})
