"""The search for the request that kills the engine, against a simulated engine with hidden culprits."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.client.quarantine import CLEARED_AFTER, Quarantine


class Simulation:
    """Requests of some length each; a culprit kills the engine whenever it is about to make its n-th token."""

    def __init__(self, lengths: list[int], deadly: dict[int, int]):
        self.quarantine = Quarantine()
        self.lengths = {str(i): length for i, length in enumerate(lengths)}
        self.deadly = {str(i): step for i, step in deadly.items()}
        self.done = dict.fromkeys(self.lengths, 0)
        self.alive = list(self.lengths)
        self.in_engine: list[str] = []
        self.convicted: list[str] = []
        self.crashes = self.unexplained = 0

    def run(self, capacity: int) -> None:
        for _ in range(20_000):
            if not self.alive:
                return
            for request_id in self.alive:
                if request_id not in self.in_engine and self.quarantine.may_run(request_id):
                    self.in_engine.append(request_id)
                    self.quarantine.started(request_id)
            self.step(self.in_engine[:capacity])
        raise AssertionError("the search never ends")

    def step(self, batch: list[str]) -> None:
        assert batch, "nobody may run"
        if any(self.deadly.get(request_id) == self.done[request_id] for request_id in batch):
            self.crashes += 1
            self.in_engine = []
            convicted, explained = self.quarantine.crashed()
            self.unexplained += not explained
            if convicted is not None:
                self.convicted.append(convicted)
                self.alive.remove(convicted)
            return
        for request_id in list(batch):
            self.done[request_id] += 1
            if self.done[request_id] == self.lengths[request_id]:
                self.alive.remove(request_id)
                self.in_engine.remove(request_id)
                self.quarantine.ended(request_id)
            elif self.quarantine.went_on(request_id):
                self.in_engine.remove(request_id)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_exactly_the_culprits_are_convicted_in_few_crashes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=40))
    culprits = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, max_size=4))
    deadly = {i: data.draw(st.integers(0, lengths[i] - 1)) for i in culprits}
    simulation = Simulation(lengths, deadly)
    simulation.run(capacity=data.draw(st.integers(1, 40)))
    assert sorted(simulation.convicted) == sorted(str(i) for i in deadly)
    assert all(simulation.done[i] == n for i, n in simulation.lengths.items() if i not in simulation.deadly)
    assert simulation.crashes <= len(deadly) * (4 + math.ceil(math.log2(len(lengths))))
    assert simulation.unexplained <= 2 * len(deadly), "crashes that count against the restarts"
    assert not simulation.quarantine.is_searching


def test_two_kills_from_outside_make_suspects_but_convict_nobody() -> None:
    quarantine = Quarantine()
    everyone = [str(i) for i in range(8)]
    for _ in range(2):
        for request_id in everyone:
            quarantine.started(request_id)
        assert quarantine.crashed() == (None, False)
    assert quarantine.is_searching
    left = set(everyone)
    while quarantine.is_searching:
        group = [request_id for request_id in everyone if request_id in left and quarantine.may_run(request_id)]
        assert len(group) <= 4
        for request_id in group:
            quarantine.started(request_id)
            for _ in range(CLEARED_AFTER):
                quarantine.went_on(request_id)
            left.discard(request_id)
    assert not left
    assert all(quarantine.may_run(request_id) for request_id in everyone)


def test_going_on_between_two_crashes_clears() -> None:
    quarantine = Quarantine()
    for _ in range(5):
        quarantine.started("a")
        for _ in range(CLEARED_AFTER):
            assert not quarantine.went_on("a")
        assert quarantine.crashed() == (None, False)
        assert not quarantine.is_searching


def test_a_crash_before_anything_ran_blames_nobody() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.started("a")
        quarantine.started("b")
        quarantine.crashed()
    assert quarantine.is_searching
    assert quarantine.crashed() == (None, False)
    assert quarantine.is_searching
    assert quarantine.may_run("a") != quarantine.may_run("b")


def test_a_lone_culprit_is_convicted_on_its_third_crash() -> None:
    quarantine = Quarantine()
    verdicts = []
    for _ in range(3):
        quarantine.started("a")
        verdicts.append(quarantine.crashed())
    assert verdicts == [(None, False), (None, False), ("a", True)]
    assert quarantine.may_run("b")
