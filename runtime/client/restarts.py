"""How often a dying engine is started again, and which requests are not tried again."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable

import msgspec

from runtime.errors import EngineDeadError
from runtime.messages import EngineRequest

_MAX_CONVICTS = 256


class RestartBudget:
    """At most `limit` restarts within any `window_s` seconds."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic):
        self._limit, self._window_s, self._clock = limit, window_s, clock
        self._deaths: deque[float] = deque()

    def spend(self, death: str) -> None:
        """Count a death. Raises `EngineDeadError`, saying how it died and how often, where it was one too many."""
        now = self._clock()
        self._deaths.append(now)
        while now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._limit:
            raise EngineDeadError(
                f"{death}; it died {len(self._deaths)} times within {self._window_s:.0f} s, and at most {self._limit} "
                "restarts are tried: start anew once the cause is mended"
            )

    def forgive(self) -> None:
        """The deaths so far have been explained and will not come again."""
        self._deaths.clear()


class Convicts:
    """Requests that killed the engine, remembered so that a client that tries again does no harm. Oldest go first."""

    def __init__(self) -> None:
        self._fingerprints: dict[bytes, None] = {}

    def add(self, request: EngineRequest) -> None:
        self._fingerprints[_fingerprint(request)] = None
        if len(self._fingerprints) > _MAX_CONVICTS:
            del self._fingerprints[next(iter(self._fingerprints))]

    def __contains__(self, request: EngineRequest) -> bool:
        return bool(self._fingerprints) and _fingerprint(request) in self._fingerprints


def _fingerprint(request: EngineRequest) -> bytes:
    """What makes two requests run alike. A seed that greedy sampling makes no use of does not tell them apart."""
    params = request.params
    if params.is_greedy:
        params = msgspec.structs.replace(params, seed=None)
    return hashlib.sha256(msgspec.msgpack.encode((request.prompt_token_ids, params))).digest()
