"""Every failure as an HTTP answer, in the words of the protocol that was spoken.

A failure has one `Kind`; a dialect (OpenAI, TGI, Anthropic) gives it its status, its type name and its JSON shape.
"""

from __future__ import annotations

import logging
import math
from enum import Enum
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from runtime.errors import (
    ArtifactError,
    EngineDeadError,
    OverloadedError,
    PlancastError,
    QueueTimeoutError,
    RequestError,
)

logger = logging.getLogger("plancast.server")


class Kind(Enum):
    """What went wrong: (OpenAI status, OpenAI type, Anthropic type, TGI status, TGI error_type)."""

    INVALID = (400, "invalid_request_error", "invalid_request_error", 422, "validation")
    AUTHENTICATION = (401, "authentication_error", "authentication_error", 401, "authentication")
    PERMISSION = (403, "permission_error", "permission_error", 403, "permission")
    NOT_FOUND = (404, "not_found_error", "not_found_error", 404, "not_found")
    METHOD = (405, "invalid_request_error", "invalid_request_error", 405, "validation")
    TIMEOUT = (408, "invalid_request_error", "invalid_request_error", 408, "validation")
    CONFLICT = (409, "conflict_error", "invalid_request_error", 409, "conflict")
    TOO_LARGE = (413, "invalid_request_error", "request_too_large", 413, "validation")
    MEDIA_TYPE = (415, "invalid_request_error", "invalid_request_error", 415, "validation")
    OVERLOADED = (429, "rate_limit_error", "rate_limit_error", 429, "overloaded")
    GENERATION = (500, "server_error", "api_error", 424, "generation")
    INTERNAL = (500, "server_error", "api_error", 500, "internal")
    UNAVAILABLE = (503, "service_unavailable_error", "overloaded_error", 503, "unavailable")


class Dialect(Enum):
    OPENAI = "openai"
    TGI = "tgi"
    ANTHROPIC = "anthropic"


_TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info"})


def route_path(scope: Scope) -> str:
    """The path as routes know it: without the prefix of a proxy."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


def dialect_of(scope: Scope) -> Dialect:
    """The protocol that a request's path belongs to."""
    path = route_path(scope)
    if path in _TGI_PATHS:
        return Dialect.TGI
    return Dialect.ANTHROPIC if path.startswith("/v1/messages") else Dialect.OPENAI


class ApiError(Exception):
    """A failure ready to be told: its kind, what to say, the field at fault, and when to try again (seconds)."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def status(self, dialect: Dialect) -> int:
        return self.kind.value[3] if dialect is Dialect.TGI else self.kind.value[0]

    def body(self, dialect: Dialect, request_id: str | None = None) -> dict[str, Any]:
        """The error as the protocol's JSON object."""
        if dialect is Dialect.TGI:
            return {"error": self.message, "error_type": self.kind.value[4]}
        if dialect is Dialect.ANTHROPIC:
            error = {"type": self.kind.value[2], "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        error = {"message": self.message, "type": self.kind.value[1], "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, dialect: Dialect, request_id: str | None = None) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.kind is Kind.AUTHENTICATION:
            headers["www-authenticate"] = "Bearer"
        content = msgspec.json.encode(self.body(dialect, request_id))
        return Response(content, self.status(dialect), headers, media_type="application/json")


def to_api_error(error: BaseException) -> ApiError:
    """Any exception as an `ApiError`. One that nobody foresaw is logged with its traceback and told without it."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(Kind.INVALID, str(error), param=error.param)
        case OverloadedError():
            code = "rate_limit_exceeded"
            return ApiError(Kind.OVERLOADED, str(error), code=code, retry_after=error.retry_after)
        case QueueTimeoutError():
            return ApiError(Kind.UNAVAILABLE, str(error), code="queue_timeout", retry_after=1.0)
        case EngineDeadError():
            return ApiError(Kind.UNAVAILABLE, str(error), code="engine_dead", retry_after=5.0)
        case ArtifactError():
            return ApiError(Kind.INVALID, str(error), code="artifact_refused")
        case PlancastError():
            return ApiError(Kind.GENERATION, str(error))
        case _:
            logger.error("unexpected error", exc_info=error)
            return ApiError(Kind.INTERNAL, "internal error; the server's log has the details under this request's id")
