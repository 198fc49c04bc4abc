"""Who is next: priorities, fairness between users, and a turn for whoever waits longest.

Among requests of one priority the user that was served least goes first, each user's own in order of arrival. Service
is counted in tokens as the Virtual Token Counter does (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): a user who comes back after a pause starts at the smallest count among those waiting, so that idling saves
up nothing. Preempted requests go before fresh ones of their priority.

No starvation: within one priority a waiting user's count stands still while the others' grow; across priorities, one
admission in `turn` goes to the request that has waited through the most admissions. And once a request is at the head
it stays there until it is admitted or something of a higher priority comes: a big one cannot be overtaken for ever by
small ones that fit.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from runtime.sequence import Request

# What a token costs a user (VTC's weights): an output token takes a pass of its own.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
_REMEMBERED_USERS = 10_000


class WaitingQueue:
    """Requests that wait for their first step, or to go on after a preemption."""

    def __init__(self, turn: int = 8):
        self.turn = turn
        self.admissions = 0
        self._last_turn = 0
        self._preempted: list[Request] = []  # by rank
        self._fresh: OrderedDict[str, Request] = OrderedDict()  # by arrival
        self._levels: dict[int, dict[str | None, OrderedDict[str, Request]]] = {}  # priority -> user -> requests
        self._service: dict[str | None, float] = {}  # tokens, weighted
        self._waiting_of: dict[str | None, int] = {}  # fresh requests of each user
        self._floor = 0.0  # the last smallest count
        self._head: Request | None = None
        self._by_turn: Request | None = None  # who was chosen for having waited longest

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    @property
    def num_fresh(self) -> int:
        """Requests that have never run."""
        return len(self._fresh)

    def push(self, request: Request) -> None:
        """Add a request that has never run."""
        user = request.user
        if not self._waiting_of.get(user):
            self._service[user] = max(self._service.get(user, 0.0), self._smallest_count())
        self._waiting_of[user] = self._waiting_of.get(user, 0) + 1
        self._fresh[request.request_id] = request
        level = self._levels.setdefault(request.priority, {})
        level.setdefault(user, OrderedDict())[request.request_id] = request
        request.admissions_at_arrival = self.admissions
        self._challenge(request.priority)

    def push_preempted(self, request: Request) -> None:
        """Put a preempted request back, before the fresh ones of its priority."""
        insort(self._preempted, request, key=_rank)
        self._challenge(request.priority, preempted=True)

    def _challenge(self, priority: int, preempted: bool = False) -> None:
        head = self._head
        if head is not None and (priority < head.priority or (preempted and priority == head.priority)):
            self._head = None

    def peek(self) -> Request | None:
        """The request whose turn it is, or None."""
        if self._head is None:
            self._head = self._choose()
        return self._head

    def _choose(self) -> Request | None:
        level = min(self._levels, default=None)
        resumed = self._preempted[0] if self._preempted else None
        if level is None:
            return resumed
        if self.admissions - self._last_turn >= self.turn:
            oldest = next(iter(self._fresh.values()))
            if resumed is not None:
                oldest = min(oldest, *self._preempted, key=lambda request: request.admissions_at_arrival)
            if self.admissions - oldest.admissions_at_arrival >= self.turn:
                self._by_turn = oldest
                return oldest
        if resumed is not None and resumed.priority <= level:
            return resumed
        users = self._levels[level]
        if len(users) == 1:
            (requests,) = users.values()
            return next(iter(requests.values()))
        service = self._service
        return min(
            (next(iter(requests.values())) for requests in users.values()),
            key=lambda request: (service[request.user], request.rank),
        )

    def admit(self, request: Request) -> None:
        """Take out a request that starts to run."""
        if request is self._by_turn:
            self._last_turn = self.admissions
        self.admissions += 1
        self.remove(request)

    def remove(self, request: Request) -> bool:
        """Take out a request wherever it stands. False where it does not wait."""
        if self._head is request:
            self._head = None
        if self._fresh.pop(request.request_id, None) is None:
            if request in self._preempted:
                self._preempted.remove(request)
                return True
            return False
        user, level = request.user, self._levels[request.priority]
        self._floor = self._service[user]
        del level[user][request.request_id]
        if not level[user]:
            del level[user]
        if not level:
            del self._levels[request.priority]
        self._waiting_of[user] -= 1
        if not self._waiting_of[user]:
            del self._waiting_of[user]
        return True

    def charge(self, user: str | None, cost: float) -> None:
        """Count service that a user got."""
        self._service[user] = self._service.get(user, 0.0) + cost

    def expired(self, now: float, timeout: float) -> list[Request]:
        """Requests that have waited longer than `timeout` seconds for their first step, oldest first."""
        found = []
        for request in self._fresh.values():
            if now - request.arrival_time <= timeout:
                break
            if not request.resumed:
                found.append(request)
        return found

    def _smallest_count(self) -> float:
        """What a user who (re)joins starts from: the smallest count among the waiting, or the last one that left."""
        if self._waiting_of:
            self._floor = min(self._service[user] for user in self._waiting_of)
        if len(self._service) > _REMEMBERED_USERS:  # forget those who came first; they start at the floor again
            latest = set(list(self._service)[-_REMEMBERED_USERS // 2 :])
            self._service = {
                user: count for user, count in self._service.items() if user in latest or user in self._waiting_of
            }
        return self._floor

    def requests(self) -> list[Request]:
        """All of them, preempted ones first."""
        return [*self._preempted, *self._fresh.values()]


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
