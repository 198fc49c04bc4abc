"""From the engine's thread to an event loop: one box a request, in which deltas merge while nobody takes them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict

from runtime.outputs import RequestOutput


class Mailbox:
    """Holds what a consumer has not taken yet, merged into one output: a slow consumer holds nobody back."""

    __slots__ = ("_lock", "_pending", "_waiter", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """From any thread. Wake the consumer afterwards, on its loop."""
        with self._lock:
            if self._pending is None:
                self._pending = output
            else:
                self._pending.add(output)

    def wake(self) -> None:
        """On the loop: let the consumer look."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """All that is new, as soon as there is something."""
        while True:
            with self._lock:
                output, self._pending = self._pending, None
            if output is not None:
                return output
            self._waiter = self.loop.create_future()
            # What came between the look and now has found no waiter to wake.
            if self._pending is None:
                try:
                    await self._waiter
                finally:
                    self._waiter = None


def deliver(pairs: list[tuple[Mailbox, RequestOutput]]) -> None:
    """Put each output into its box, and wake each loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = defaultdict(list)
    for box, output in pairs:
        box.put(output)
        by_loop[box.loop].append(box)
    for loop, boxes in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_wake, boxes)


def _wake(boxes: list[Mailbox]) -> None:
    for box in boxes:
        box.wake()
