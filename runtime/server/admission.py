"""Overload: a bounded number of sequences in flight, and an honest `Retry-After` for those that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import OverloadedError
from runtime.server.errors import ApiError, Kind
from runtime.server.tracking import Tracker


class Admission:
    """Counts sequences (prompts times n) in flight. One event loop, so no lock."""

    def __init__(self, limit: int, tracker: Tracker):
        self.limit = limit
        self.tracker = tracker
        self.in_flight = 0
        self.draining = False

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Hold `sequences` places. Raises `OverloadedError` (429) when they are not free, 503 while draining."""
        self.check(sequences)
        self.in_flight += sequences
        try:
            yield
        finally:
            self.in_flight -= sequences

    def check(self, sequences: int) -> None:
        if self.draining:
            message = "the server is shutting down and takes no new requests"
            raise ApiError(Kind.UNAVAILABLE, message, code="draining", retry_after=10)
        if sequences > self.limit:
            message = f"the request asks for {sequences} sequences; this server runs at most {self.limit} at once"
            raise ApiError(Kind.INVALID, message, param="n")
        if self.in_flight + sequences > self.limit:
            # A place frees up, on average, every mean request time / limit.
            retry_after = min(60.0, max(1.0, self.tracker.mean_seconds * sequences / self.limit))
            message = (
                f"{self.in_flight} sequences are in flight, and this server takes at most {self.limit}; "
                f"try again in {retry_after:.0f} s"
            )
            raise OverloadedError(message, retry_after)
