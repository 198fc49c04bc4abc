"""The restart budget, and the memory of requests that killed the engine."""

from __future__ import annotations

import pytest
from engine_clients import request

from runtime.client.restarts import Convicts, RestartBudget
from runtime.errors import EngineDeadError
from runtime.sampling_params import SamplingParams


def test_deaths_far_apart_are_always_mended() -> None:
    now = [0.0]
    budget = RestartBudget(2, 300.0, lambda: now[0])
    for _ in range(50):
        budget.spend("it fell")
        now[0] += 150.1
    budget.spend("it fell")
    with pytest.raises(EngineDeadError, match="it fell; it died 3 times within 300 s, and at most 2 restarts"):
        budget.spend("it fell")


def test_explained_deaths_are_forgiven() -> None:
    budget = RestartBudget(1, 300.0)
    for _ in range(5):
        budget.spend("it fell")
        budget.forgive()
    budget.spend("it fell")
    with pytest.raises(EngineDeadError):
        budget.spend("it fell")


def test_a_convict_is_known_by_what_it_would_do() -> None:
    convicts = Convicts()
    greedy = SamplingParams(temperature=0.0, seed=1)
    sampled = SamplingParams(temperature=1.0, seed=1)
    assert request("a", [1, 2], greedy) not in convicts
    convicts.add(request("a", [1, 2], greedy))
    convicts.add(request("b", [3], sampled))
    assert request("other", [1, 2], SamplingParams(temperature=0.0, seed=99)) in convicts
    assert request("other", [3], sampled) in convicts
    assert request("other", [3], SamplingParams(temperature=1.0, seed=2)) not in convicts
    assert request("other", [1, 2, 3], greedy) not in convicts
    for i in range(300):
        convicts.add(request(f"r{i}", [i, i], greedy))
    assert request("a", [1, 2], greedy) not in convicts
    assert request("other", [299, 299], greedy) in convicts
