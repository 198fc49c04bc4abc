"""A client for OpenAI's completions and chats that costs little: it must not measure itself.

One connection a request, parsed by httptools; each event is timed the moment its packet is read.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go: a server's URL (with the path prefix that it may have), and its key."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0  # seconds for one request

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)

    def path(self, route: str) -> str:
        """`route` under the URL's own path, of which a trailing /v1 is not repeated."""
        prefix = urlsplit(self.url).path.rstrip("/")
        if prefix.endswith("/v1") and route.startswith("/v1"):
            prefix = prefix.removesuffix("/v1")
        return prefix + route


class RequestFailed(Exception):  # noqa: N818 (it is what happened to a request)
    """A request that brought no whole answer: the status and what the server said, or what broke."""


class _Exchange(asyncio.Protocol):
    """One request and its response: collects the body, and notes when each piece of it came."""

    def __init__(self, request: bytes):
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed{f': {exc}' if exc else ' before the answer was whole'}")

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(RequestFailed(reason))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def exchange(endpoint: Endpoint, method: str, route: str, body: Any = None) -> tuple[int, list]:
    """Status, and the body's pieces as (`time.perf_counter()` seconds, bytes). Raises `RequestFailed`."""
    host, port = endpoint.address
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {endpoint.path(route)} HTTP/1.1", f"host: {host}:{port}", "connection: close"]
    if body is not None:
        head += ["content-type: application/json", f"content-length: {len(content)}"]
    if endpoint.api_key is not None:
        head.append(f"authorization: Bearer {endpoint.api_key}")
    raw = "\r\n".join([*head, "", ""]).encode() + content
    context = ssl.create_default_context() if endpoint.url.startswith("https:") else None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(endpoint.timeout):
            _, protocol = await loop.create_connection(lambda: _Exchange(raw), host, port, ssl=context)
            try:
                await protocol.done
            finally:
                protocol.close()
    except TimeoutError:
        raise RequestFailed(f"no whole answer within {endpoint.timeout:g} s") from None
    except OSError as error:
        raise RequestFailed(f"{host}:{port}: {error}") from None
    return protocol.status, protocol.pieces


async def fetch(endpoint: Endpoint, method: str, route: str, body: Any = None) -> Any:
    """A JSON answer. Raises `RequestFailed` for any status but 200, and for what is no JSON."""
    status, pieces = await exchange(endpoint, method, route, body)
    content = b"".join(piece for _, piece in pieces)
    if status != 200:
        raise RequestFailed(f"{route}: status {status}: {content[:300].decode(errors='replace')}")
    try:
        return json.loads(content)
    except ValueError:
        raise RequestFailed(f"{route}: the answer is no JSON: {content[:100]!r}") from None


@dataclass(slots=True)
class Reply:
    """A streamed answer. Times are seconds since the request was sent; `times` has one entry an event with text."""

    started: float  # `time.perf_counter()`
    text: str = ""
    finish_reason: str | None = None
    done: bool = False  # it ended with [DONE]
    prompt_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] if self.times else self.latency

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


async def stream(endpoint: Endpoint, route: str, body: dict[str, Any]) -> Reply:
    """Run a streamed completion or chat to its end. What goes wrong is in `Reply.error`, never raised."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    reply = Reply(started)
    try:
        status, pieces = await exchange(endpoint, "POST", route, body)
    except RequestFailed as error:
        reply.error, reply.latency = str(error), time.perf_counter() - started
        return reply
    reply.latency = (pieces[-1][0] if pieces else time.perf_counter()) - started
    if status != 200:
        content = b"".join(piece for _, piece in pieces)
        reply.error = f"status {status}: {content[:300].decode(errors='replace')}"
        return reply
    _read_events(reply, pieces)
    if reply.error is None and reply.finish_reason is None:
        reply.error = "the stream ended without a finish reason"
    return reply


def _read_events(reply: Reply, pieces: list[tuple[float, bytes]]) -> None:
    """Take the events apart, once the answer is whole: while it comes, only its packets are timed."""
    buffer = b""
    chunks = 0
    for at, piece in pieces:
        *events, buffer = (buffer + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        spoke = False
        for event in events:
            if not event.startswith(b"data:"):  # a comment keeps the connection alive
                continue
            data = event[5:].strip()
            if data == b"[DONE]":
                reply.done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                reply.error = str(chunk["error"].get("message", chunk["error"]))
                return
            if usage := chunk.get("usage"):
                reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
                if text:
                    reply.text += text
                    spoke, chunks = True, chunks + 1
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if spoke:
            reply.times.append(at - reply.started)
    if not reply.output_tokens:  # a server that counts none
        reply.output_tokens = chunks
    if reply.times:
        reply.latency = reply.times[-1]  # as vLLM: to the last token, not to the connection's end
