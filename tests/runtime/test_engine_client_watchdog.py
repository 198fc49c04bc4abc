"""When silence means that an engine hangs."""

from __future__ import annotations

import pytest
from core_driver import FakeClock

from runtime.client.watchdog import Watchdog
from runtime.errors import PlancastError


def watch(limit_s: float | None, looks: list[tuple[float, bool, bool]]) -> list[bool]:
    """The verdicts of looks at (seconds since the last one, is_due, has_spoken)."""
    clock = FakeClock()
    dog = Watchdog(limit_s, clock)
    verdicts = []
    for seconds, is_due, has_spoken in looks:
        clock.now += seconds
        verdicts.append(dog.look(is_due=is_due, has_spoken=has_spoken))
    return verdicts


def test_silence_while_an_answer_is_due_is_counted() -> None:
    assert watch(4.0, [(0, True, False)] + [(1, True, False)] * 4) == [False] * 4 + [True]
    assert watch(None, [(4, True, False)] * 100) == [False] * 100


def test_a_word_or_nothing_due_starts_anew() -> None:
    assert not any(watch(2.5, [(1, True, False), (1, True, False), (1, True, True)] * 5))
    assert not any(watch(2.5, [(1, True, False), (1, True, False), (9, False, False)] * 5))
    assert not any(watch(2.0, [(100, False, False)] * 5))


def test_a_machine_that_stood_still_does_not_make_the_engine_hang() -> None:
    assert watch(60.0, [(0, True, False), (3600, True, False)]) == [False, False]


def test_patience_ends_before_the_limit() -> None:
    clock = FakeClock()
    dog = Watchdog(4.0, clock)
    assert dog.patience_s() is None, "nothing is due"
    dog.look(is_due=True, has_spoken=False)
    assert dog.patience_s() == 2.5
    clock.now += 2.5
    dog.look(is_due=True, has_spoken=False)
    assert dog.patience_s() == 1.5
    assert Watchdog(None).patience_s() is None


def test_a_limit_below_zero_is_refused() -> None:
    from runtime.client.frontend import Frontend

    with pytest.raises(PlancastError, match="engine_step_timeout is -1"):
        Frontend("anything", lambda pairs: None, in_process=True, engine_step_timeout=-1)
