"""The OpenAPI description, made from the very types that bodies are decoded into and answers encoded from."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from runtime.server.errors import Dialect
from runtime.server.protocol import errors as wire

_REF = "#/components/schemas/{name}"
_documented: dict[Any, None] = {}  # every type that a route names, in order

_ERROR_TYPES = {
    Dialect.OPENAI: wire.OpenAIErrorResponse,
    Dialect.TGI: wire.TgiErrorResponse,
    Dialect.ANTHROPIC: wire.AnthropicErrorResponse,
}
# One server-sent event.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STATUS_TEXT = {
    400: "The request is invalid; the message names the field",
    401: "The API key is missing or wrong",
    403: "The key does not allow this",
    404: "No such model, response or route",
    405: "The route has other methods",
    408: "The body did not arrive in time",
    409: "Already so",
    413: "The body is larger than the server takes",
    415: "The body is not declared as application/json",
    422: "The request is invalid; the message names the field",
    424: "The engine failed on this request",
    429: "Overloaded: try again after `Retry-After` seconds",
    500: "The engine failed on this request",
    503: "Draining, the engine is down, or the queue timeout passed",
}


def _schema(kind: Any) -> dict[str, Any]:
    _documented.setdefault(kind)
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def describe(
    *,
    body: Any = None,
    returns: Any = None,
    streams: bool = False,
    media_type: str | tuple[str, ...] = "application/json",
    dialect: Dialect = Dialect.OPENAI,
    statuses: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Keyword arguments for a router's decorator: the body's type, the answer's type, and the errors of the dialect."""
    content: dict[str, Any] = {}
    if returns is not None:
        for kind in (media_type,) if isinstance(media_type, str) else media_type:
            content[kind] = {"schema": _schema(returns)}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: dict[int, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    if body is not None and not content:
        responses[200] = {"description": "Never"}
    if body is not None:
        invalid = (422, 424) if dialect is Dialect.TGI else (400, 500)
        statuses = (401, *invalid, 404, 408, 413, 415, 429, 503, *statuses)
    error = {"application/json": {"schema": _schema(_ERROR_TYPES[dialect])}}
    for status in sorted(set(statuses)):
        responses[status] = {"description": _STATUS_TEXT[status], "content": error}
    described: dict[str, Any] = {"responses": responses, "response_class": Response, "response_model": None}
    if body is not None:
        request_body = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
        described["openapi_extra"] = {"requestBody": request_body}
    return described


def install(app: FastAPI) -> None:
    """Make `app.openapi()` carry the components of every described type."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, components = msgspec.json.schema_components(list(_documented), ref_template=_REF)
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {}).update(components)
            parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
