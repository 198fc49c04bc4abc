"""HTTP as uvicorn speaks it, with limits that it leaves out: how long, and how large, a request's head may be.

Without them a client that sends its headers one byte a minute keeps a connection for ever, and one that never ends
them fills the memory. Bodies have their own limits (`body.py`).
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class HttpProtocol(HttpToolsProtocol):
    """One connection. A head that takes too long is answered with 408, one that is too large with 431."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # runs while a head is awaited or incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None:
            self._head_bytes = 0
            return
        # Only bytes that left the head incomplete count, so a body in the same packet never does.
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_complete()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _head_is_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        self._head_is_complete()
        if self.transport.is_closing():
            return
        self.logger.warning("%s: closing the connection", status.phrase)
        if self.cycle is None or self.cycle.response_complete:  # else an answer is on its way: only close
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()
