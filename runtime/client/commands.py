"""From any thread to the one that owns the engine: a queue whose file descriptor wakes a poller."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any


class CommandQueue:
    """Takes commands until it is told to refuse them, and says why it does. Thread-safe.

    Attributes:
        fd: readable while there are commands; -1 once closed.
        refusal: why no more are taken; None while they are.
    """

    def __init__(self) -> None:
        # Reentrant: a collected stream may abort in mid-call.
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.refusal: str | None = None

    def put(self, command: Any, *, even_if_refused: bool = False) -> bool:
        """False: it is refused."""
        with self._lock:
            if self.fd < 0 or (self.refusal is not None and not even_if_refused):
                return False
            self._queue.put(command)
            os.eventfd_write(self.fd, 1)
            return True

    def refuse(self, reason: str) -> None:
        """Take no more from now on. The first reason stays."""
        with self._lock:
            self.refusal = self.refusal or reason

    def take(self) -> list[Any]:
        """All that are there, by the thread that polls."""
        os.eventfd_read(self.fd)
        return self._drain()

    def close(self, reason: str) -> list[Any]:
        """Refuse everything. Returns what nobody took."""
        with self._lock:
            self.refuse(reason)
            os.close(self.fd)
            self.fd = -1
        return self._drain()

    def _drain(self) -> list[Any]:
        commands = []
        try:
            while True:
                commands.append(self._queue.get_nowait())
        except queue.Empty:
            return commands
