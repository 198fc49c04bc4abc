"""Notices an engine that lives and yet does not finish its step: a deadlocked kernel, a device that never answers.

A core with work says something at least every `HEARTBEAT_S` while its steps end (`runtime/engine_loop.py`), so silence
for longer than the limit means one step that has not ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# At most so much of one look's time counts: where this process, or the machine, stood still, the core did as well.
_MAX_LOOK_S = 5.0


class Watchdog:
    """Counts a core's silence while it owes an answer. `limit_s`: None never barks."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic):
        self.limit_s = limit_s
        self._clock = clock
        self._silence = 0.0
        self._looked_at: float | None = None

    def look(self, *, is_due: bool, has_spoken: bool) -> bool:
        """Look at the core, at least every `patience_s`. True: it hangs."""
        now = self._clock()
        if not is_due or has_spoken or self._looked_at is None:
            self._silence = 0.0
        else:
            self._silence += min(now - self._looked_at, _MAX_LOOK_S)
        self._looked_at = now if is_due else None
        return self.limit_s is not None and self._silence >= self.limit_s

    def patience_s(self) -> float | None:
        """How long may pass until the next look; None: it does not matter."""
        if self.limit_s is None or self._looked_at is None:
            return None
        return min(_MAX_LOOK_S / 2, max(0.01, self.limit_s - self._silence))
