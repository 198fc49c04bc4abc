"""Around every route: an id, a key check, a log line, the last net for exceptions. Plain ASGI: no task a request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server import logs, tracing
from runtime.server.auth import ApiKeys, key_of
from runtime.server.errors import ApiError, Kind, dialect_of, route_path, to_api_error

if TYPE_CHECKING:
    from runtime.server.state import ServerState

logger = logging.getLogger("plancast.server")

# What needs no key: probes, the page's own files (they hold no data), and metrics, which Prometheus scrapes bare.
_OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/ping"})
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/ping"})
_ADMIN_PREFIX = "/admin/"


def _id_of(headers: Headers) -> str:
    """The caller's `x-request-id` where it is fit for a header and a log line, else a fresh one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class Gate:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, state: ServerState):
        self.app = app
        self.state = state
        self.keys = ApiKeys(state.config.api_keys)
        self.admin_keys = ApiKeys(state.config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = route_path(scope)
        request_id = _id_of(headers)
        token = logs.request_id.set(request_id)
        if self.state.tracer is not None:
            tracing.carrier.set(headers)
        scope.setdefault("state", {})["log"] = extras = {}
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self.check_key(scope["method"], path, headers)
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the drain's time is over, or a second signal came
            if status == 0:
                message = "the server shut down before the request was finished"
                failure = ApiError(Kind.UNAVAILABLE, message, code="shutdown")
                await failure.response(dialect_of(scope), request_id)(scope, receive, send_with_id)
        except Exception as error:
            failure = to_api_error(error)
            if status == 0:
                await failure.response(dialect_of(scope), request_id)(scope, receive, send_with_id)
        finally:
            self.log(scope["method"], path, status, time.perf_counter() - started, extras)
            logs.request_id.reset(token)

    def check_key(self, method: str, path: str, headers: Headers) -> None:
        """Raises `ApiError` 401 or 403. Admin routes need an admin key, which also opens the others."""
        key = key_of(headers)
        if path.startswith(_ADMIN_PREFIX):
            if not self.admin_keys:
                message = "admin routes are off: start the server with --admin-key-file or PLANCAST_ADMIN_KEY"
                raise ApiError(Kind.PERMISSION, message, code="admin_disabled")
            if not self.admin_keys.accept(key):
                raise ApiError(Kind.AUTHENTICATION, "this route needs an admin key", code="invalid_api_key")
            return
        is_page = method in ("GET", "HEAD") and (path == "/" or path.startswith("/static/"))
        if not self.keys or is_page or path in _OPEN_PATHS or method == "OPTIONS":
            return
        if not (self.keys.accept(key) or self.admin_keys.accept(key)):
            message = "the API key is wrong" if key else "an API key is needed: `Authorization: Bearer KEY`"
            raise ApiError(Kind.AUTHENTICATION, message, code="invalid_api_key")

    def log(self, method: str, path: str, status: int, seconds: float, extras: dict[str, Any]) -> None:
        level = logging.DEBUG if path in _QUIET_PATHS or path.startswith("/static/") else logging.INFO
        if logger.isEnabledFor(level):
            # 499, as nginx says it: the client went away before there was an answer.
            outcome = {"status": status or 499, "ms": round(seconds * 1e3, 1), **extras}
            logger.log(level, "%s %s", method, path, extra=outcome)
