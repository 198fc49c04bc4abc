"""The responses that `/v1/responses` keeps: a bounded number, the oldest finished ones go first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from runtime.server.errors import ApiError, Kind
from runtime.server.protocol.responses import ResponseObject

CAPACITY = 1024


@dataclass(slots=True)
class Stored:
    """A response, the chat that led to it and answers it, and its events so far for whoever listens."""

    response: ResponseObject
    messages: list[dict[str, Any]]  # the chat, without instructions, with the answer once it is finished
    task: asyncio.Task[None] | None = None
    failure: ApiError | None = None  # what it failed with
    events: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

    def publish(self, event: bytes) -> None:
        self.events.append(event)
        self.wake()

    def wake(self) -> None:
        """Tell everyone who listens; a fresh event serves the next wait."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Its events from the `start`-th on, until it is over."""
        position = start
        while True:
            batch = self.events[position:]
            if batch:
                position += len(batch)
                yield b"".join(batch)
                continue
            if self.is_over:
                return
            await self.changed.wait()


class ResponseStore:
    """Responses by id. In memory: a restart forgets them."""

    def __init__(self, capacity: int = CAPACITY):
        self.capacity = capacity
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        self._stored[stored.response.id] = stored
        while len(self._stored) > self.capacity:
            oldest = next((key for key, value in self._stored.items() if value.is_over), None)
            if oldest is None:
                return
            del self._stored[oldest]

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """Raises 404."""
        try:
            return self._stored[response_id]
        except KeyError:
            message = (
                f"`{param}`: no response {response_id!r} is stored (the last {self.capacity} are, until a restart)"
            )
            raise ApiError(Kind.NOT_FOUND, message, param=param, code="response_not_found") from None

    def remove(self, response_id: str) -> Stored:
        stored = self.get(response_id)
        del self._stored[response_id]
        return stored
