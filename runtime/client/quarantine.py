"""Finds the request that kills the engine, so that it is refused alone. Pure bookkeeping: no process, no clock.

A request is suspect when it was in flight at two crashes in a row without going on in between: what kills an engine
does so again at the same place. Suspects are then run in groups, with nothing else in the engine. A group that dies is
halved; a member that goes on past its place is cleared; one that dies with nothing beside it is convicted. Every crash
of a search halves a group, so k culprits among n suspects cost at most about k * log2(n) crashes, and nobody is
convicted for a neighbour's fault.
"""

from __future__ import annotations

from collections import deque

# Steps with new tokens that a request must go on for. A few: the last steps' answers may be lost with the engine.
CLEARED_AFTER = 4


class Quarantine:
    """Who may run now, told by what happened so far. Request ids throughout."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}  # in the engine now -> steps with new tokens since it was given
        self._strikes: dict[str, int] = {}  # crashes in a row without going on
        self._group: list[str] = []  # the suspects that may run now; empty: no search
        self._groups: deque[list[str]] = deque()

    @property
    def is_searching(self) -> bool:
        return bool(self._group)

    def may_run(self, request_id: str) -> bool:
        return not self._group or request_id in self._group

    def started(self, request_id: str) -> None:
        """The request was given to the engine."""
        self._running[request_id] = 0

    def went_on(self, request_id: str) -> bool:
        """The request got new tokens. True: it is cleared and must leave the engine until the search is over."""
        if request_id not in self._running:
            return False
        self._running[request_id] += 1
        if self._running[request_id] < CLEARED_AFTER:
            return False
        self._strikes.pop(request_id, None)
        if request_id not in self._group:
            return False
        self._leave_search(request_id)
        if not self.is_searching:
            return False
        del self._running[request_id]
        return True

    def ended(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self._running.pop(request_id, None)
        self._strikes.pop(request_id, None)
        self._leave_search(request_id)

    def crashed(self) -> tuple[str | None, bool]:
        """The engine died. Returns the convicted request, if any, and whether the crash taught anything."""
        victims, self._running = self._running, {}
        if not self.is_searching:
            for request_id, steps in victims.items():
                self._strikes[request_id] = 1 + (self._strikes.get(request_id, 0) if steps < CLEARED_AFTER else 0)
            self._search([request_id for request_id in victims if self._strikes[request_id] > 1], others=[])
            return None, False
        blamed = [request_id for request_id in self._group if request_id in victims]
        if len(blamed) == 1:
            self.ended(blamed[0])
            return blamed[0], True
        self._search(blamed, others=[request_id for request_id in self._group if request_id not in victims])
        return None, bool(blamed)

    def _search(self, suspects: list[str], *, others: list[str]) -> None:
        middle = (len(suspects) + 1) // 2
        groups = [group for group in (suspects[:middle], suspects[middle:], others) if group]
        self._groups.extendleft(reversed(groups))
        self._group = self._groups.popleft() if self._groups else []

    def _leave_search(self, request_id: str) -> None:
        for group in (self._group, *self._groups):
            if request_id in group:
                group.remove(request_id)
        while not self._group and self._groups:
            self._group = self._groups.popleft()
