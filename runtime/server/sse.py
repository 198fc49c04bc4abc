"""Server-sent events, and what a client's going away means.

A response of ours watches the connection while it waits for the engine: the moment the client is gone, the work is
cancelled, and cancelling it aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.server.errors import ApiError, to_api_error

T = TypeVar("T")

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Proxies must not hold a stream back (nginx buffers by default).
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


def data(message: Any) -> bytes:
    """One unnamed event."""
    return b"data: " + encode(message) + b"\n\n"


def event(name: str, message: Any) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(message) + b"\n\n"


class TextTemplate:
    """An event that differs from its neighbours in one string: encoded once, then filled in.

    `message` is the event with `slot` where the text goes.
    """

    slot = "\x01text\x01"

    def __init__(self, message: Any):
        self._head, self._tail = data(message).split(encode(self.slot))

    def fill(self, text: str) -> bytes:
        return self._head + encode(text) + self._tail


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises `ClientGoneError` if the client goes away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(watch, task)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait for it, so that its clean-up (the abort) has happened."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SseResponse(Response):
    """Streams `events`, each already encoded, and closes the generator when the stream ends or the client goes away.

    The status line waits for the first event (at most one keep-alive interval), so that a request that fails at once
    still gets its proper status. A failure after that becomes `on_error`'s last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[ApiError], bytes],
        keep_alive_interval: float,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(headers={**HEADERS, **(headers or {})}, media_type=self.media_type)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self.events = events
        self.on_error = on_error
        self.keep_alive_interval = keep_alive_interval
        self._started = False
        self._lock = asyncio.Lock()  # one writer at a time: the pump, or the keep-alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            while not (pump.done() or watch.done()):
                wrote_at = self._wrote_at = asyncio.get_running_loop().time()
                await asyncio.wait({pump, watch}, timeout=self.keep_alive_interval, return_when=asyncio.FIRST_COMPLETED)
                silent = not (pump.done() or watch.done()) and self._wrote_at == wrote_at
                if silent and not self._lock.locked():  # a locked one has a slow reader: it needs no waking
                    await self._write(send, KEEP_ALIVE)
            if pump.done():
                pump.result()
        finally:
            await _cancel(watch, pump)
            await self.events.aclose()

    async def _pump(self, send: Send) -> None:
        try:
            async for chunk in self.events:
                await self._write(send, chunk)
        except Exception as error:
            if not self._started:
                raise
            await self._write(send, self.on_error(to_api_error(error)))
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, chunk: bytes, more: bool = True) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._wrote_at = asyncio.get_running_loop().time()
