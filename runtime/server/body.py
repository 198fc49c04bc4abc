"""A request's body: read within its limit, decoded strictly into its type, refused by the name of the field."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from runtime.server.errors import ApiError, Kind

T = TypeVar("T")

_PAUSE_S = 30.0  # a body that stops for so long is given up

_AT = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`$")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises 413 as soon as it is known to exceed `max_bytes`, 415 where it is not declared JSON, 408
    where it stops coming.

    The media type is checked because a browser lets any page send `text/plain` across origins without asking.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(Kind.MEDIA_TYPE, f"content-type must be application/json, not {media_type or 'missing'!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(Kind.MEDIA_TYPE, f"content-encoding {encoding!r} is not supported: send the body as it is")
    too_large = ApiError(Kind.TOO_LARGE, f"the request body exceeds the limit of {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        stream = request.stream()
        while True:
            async with asyncio.timeout(_PAUSE_S):
                chunk = await anext(stream, None)
            if chunk is None:
                break
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(Kind.INVALID, "the client closed the connection before the body was complete") from None
    except TimeoutError:
        message = f"nothing of the body came for {_PAUSE_S:g} s, with {size} bytes received"
        raise ApiError(Kind.TIMEOUT, message) from None
    return b"".join(chunks)


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """JSON `raw` as `kind`. Raises `ApiError` (400) that names the field, what was expected and what was found."""
    try:
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(Kind.INVALID, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(Kind.INVALID, "the body is nested too deeply", code="invalid_json") from None


def convert(value: Any, kind: type[T], at: str) -> T:
    """Decoded JSON `value` as `kind`; errors name the field below `at`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), at) from None


def string_of(item: dict[str, Any], key: str, at: str) -> str:
    """The string `item[key]` of a block that has no type of its own. Raises 400 that names it."""
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(Kind.INVALID, f"`{at}.{key}` must be a string", param=f"{at}.{key}")
    return value


def _field_error(message: str, prefix: str = "") -> ApiError:
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else (message, "")
    param = (prefix + path).lstrip(".")
    if found and found["key"]:
        what = f"a key is wrong: {what}"
    if missing := _MISSING.match(what):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return ApiError(Kind.INVALID, f"`{param}` is required", param=param, code="missing_required_parameter")
    if not param:
        return ApiError(Kind.INVALID, f"the body is invalid: {what[:1].lower()}{what[1:]}")
    return ApiError(Kind.INVALID, f"`{param}`: {what[:1].lower()}{what[1:]}", param=param, code="invalid_value")
