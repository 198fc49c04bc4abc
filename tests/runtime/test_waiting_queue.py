"""Whose turn it is."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
from core_driver import make_request
from hypothesis import given, settings

from runtime.scheduling.waiting_queue import WaitingQueue
from runtime.sequence import Request, Sequence


class Arrivals:
    """Makes requests in order of arrival."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, priority: int = 0, user: str | None = None, arrival_time: float = 0.0) -> Request:
        self.count += 1
        message = make_request(f"{self.count}", [1], user=user, arrival_time=arrival_time)
        request = Request(message, (priority, self.count), 1, 10)
        request.live = request.sequences = [Sequence(request, 0, array("i", [1]))]
        return request


def drain(queue: WaitingQueue, cost: int = 10) -> list[Request]:
    order = []
    while (request := queue.peek()) is not None:
        queue.admit(request)
        queue.charge(request.user, cost)
        order.append(request)
    assert len(queue) == 0
    return order


def test_without_users_the_order_is_that_of_arrival() -> None:
    queue, make = WaitingQueue(), Arrivals()
    requests = [make() for _ in range(20)]
    for request in requests:
        queue.push(request)
    assert drain(queue) == requests


def test_priorities_come_first_and_arrival_second() -> None:
    queue, make = WaitingQueue(turn=100), Arrivals()
    requests = [make(priority) for priority in (2, 0, 1, 0, 2, 1)]
    for request in requests:
        queue.push(request)
    assert [request.priority for request in drain(queue)] == [0, 0, 1, 1, 2, 2]


def test_one_turn_in_so_many_goes_to_whoever_waits_longest() -> None:
    """A stream of urgent requests that never ends cannot keep a patient one out."""
    queue, make = WaitingQueue(turn=4), Arrivals()
    patient = make(priority=9)
    queue.push(patient)
    for admitted in range(50):
        queue.push(make(priority=0))
        request = queue.peek()
        assert request is not None
        queue.admit(request)
        if request is patient:
            assert admitted == 4
            return
    raise AssertionError("starved")


def test_users_take_turns_however_many_requests_one_sends() -> None:
    queue, make = WaitingQueue(), Arrivals()
    for _ in range(6):
        queue.push(make(user="busy"))
    for _ in range(2):
        queue.push(make(user="modest"))
    assert [request.user for request in drain(queue)][:4] == ["busy", "modest", "busy", "modest"]


def test_a_user_who_comes_back_has_saved_up_nothing() -> None:
    queue, make = WaitingQueue(), Arrivals()
    for _ in range(40):
        queue.push(make(user="steady"))
    queue.charge("steady", 1000)
    for _ in range(20):
        queue.push(make(user="idler"))
    order = [request.user for request in drain(queue)]
    assert order[:20].count("idler") in (10, 11)


def test_preempted_requests_go_before_fresh_ones_of_their_priority() -> None:
    queue, make = WaitingQueue(), Arrivals()
    urgent, preempted, fresh = make(0), make(1), make(1)
    queue.push(fresh)
    assert queue.peek() is fresh
    queue.push_preempted(preempted)
    assert queue.peek() is preempted
    queue.push(urgent)
    assert drain(queue) == [urgent, preempted, fresh]


def test_the_head_keeps_its_turn() -> None:
    """Service counts change while it waits for memory; it is not overtaken."""
    queue, make = WaitingQueue(), Arrivals()
    big, small = make(user="a"), make(user="b")
    queue.push(big)
    queue.push(small)
    assert queue.peek() is big
    queue.charge("a", 1000)
    assert queue.peek() is big


def test_remove_works_anywhere() -> None:
    queue, make = WaitingQueue(), Arrivals()
    fresh, preempted, other = make(user="a"), make(), make(user="b")
    queue.push(fresh)
    queue.push(other)
    queue.push_preempted(preempted)
    assert queue.remove(fresh)
    assert queue.remove(preempted)
    assert not queue.remove(fresh)
    assert queue.requests() == [other]


def test_expired_requests_are_the_fresh_ones_that_waited_too_long() -> None:
    queue, make = WaitingQueue(), Arrivals()
    old, resumed, new = make(arrival_time=1.0), make(arrival_time=1.0), make(arrival_time=5.0)
    resumed.resumed = True
    for request in (old, resumed, new):
        queue.push(request)
    queue.push_preempted(make(arrival_time=0.0))
    assert queue.expired(now=5.5, timeout=2.0) == [old]


def test_thousands_of_users_leave_no_trace() -> None:
    queue, make = WaitingQueue(), Arrivals()
    for index in range(12_000):
        queue.push(make(user=str(index)))
        drain(queue)
    assert len(queue._service) <= 10_001


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, "a", "b"]), st.integers(1, 50)), max_size=60),
    st.integers(1, 5),
)
def test_everybody_is_admitted_within_a_bound(arrivals: list[tuple[int, str | None, int]], turn: int) -> None:
    """While newcomers keep coming at the rate of admissions, nobody waits for more than turn x (those before + 2)."""
    queue, make = WaitingQueue(turn), Arrivals()
    for priority, user, _ in arrivals[: len(arrivals) // 2]:
        queue.push(make(priority, user))
    newcomers = arrivals[len(arrivals) // 2 :]
    while (request := queue.peek()) is not None:
        waited_through = queue.admissions - request.admissions_at_arrival
        assert waited_through <= turn * (request.rank[1] + 2)
        queue.admit(request)
        if newcomers:
            priority, user, cost = newcomers.pop()
            queue.charge(request.user, cost)
            queue.push(make(priority, user))
