"""Error objects of the three protocols (built in `runtime.server.errors`; here for the OpenAPI description)."""

from __future__ import annotations

from typing import Literal

import msgspec


class OpenAIError(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(msgspec.Struct, kw_only=True):
    error: OpenAIError


class TgiErrorResponse(msgspec.Struct, kw_only=True):
    error: str
    error_type: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, kw_only=True):
    type: Literal["error"]
    error: AnthropicError
    request_id: str | None = None
