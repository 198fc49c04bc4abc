"""A measurement that is ended takes the engines that it started with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by way of its context managers. Exit code: 128 + the signal."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
