"""A request's fields as `SamplingParams`, checked against the model's context and the server's limits."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.sampling_params import SamplingParams
from runtime.server.config import RequestLimits
from runtime.server.errors import ApiError, Kind
from runtime.server.protocol.sampling import (
    GrammarFormat,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    SamplingFields,
    TextFormat,
)
from runtime.server.registry import ServedModel

# Fields that mean the same under the same name.
_SHARED = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name != "structured_outputs"
)


def invalid(param: str, message: str) -> ApiError:
    """A 400 about one field."""
    return ApiError(Kind.INVALID, f"`{param}`: {message}", param=param, code="invalid_value")


def fit_max_tokens(
    prompt_tokens: int,
    max_tokens: int | None,
    max_context_len: int,
    param: str = "max_tokens",
    prompt_param: str = "prompt",
) -> int:
    """Output tokens that the context leaves room for. Raises 400 with all three numbers where it does not."""
    room = max_context_len - prompt_tokens
    if room < 1:
        size = f"the prompt (`{prompt_param}`) has {prompt_tokens} tokens"
        message = f"{size}; the context holds {max_context_len}, and one is for the answer"
        raise ApiError(Kind.INVALID, message, param=prompt_param, code="context_length_exceeded")
    if max_tokens is None:
        return room
    if max_tokens > room:
        message = (
            f"the prompt has {prompt_tokens} tokens and `{param}` is {max_tokens}: together "
            f"{prompt_tokens + max_tokens}; the context holds {max_context_len} (`{param}` may be at most {room})"
        )
        raise ApiError(Kind.INVALID, message, param=param, code="context_length_exceeded")
    return max_tokens


def check_limit(name: str, value: int, limit: int) -> None:
    """Raises 400 where `value` is above `limit`, or is -1: all that there are."""
    if not 0 <= value <= limit:
        whole = " (all of them)" if value < 0 else ""
        raise invalid(name, f"{value}{whole} is above this server's limit of {limit}")


def check_limits(params: SamplingParams, limits: RequestLimits) -> None:
    """Raises 400 with the field, its value and the limit."""
    check_limit("n", params.n, limits.max_n)
    check_limit("best_of", params.best_of or 1, limits.max_best_of)
    check_limit("logprobs", params.logprobs or 0, limits.max_logprobs)
    check_limit("prompt_logprobs", params.prompt_logprobs or 0, limits.max_logprobs)
    check_limit("stop", len(params.stop_strings), limits.max_stop)
    longest = max(map(len, params.stop_strings), default=0)
    if longest > limits.max_stop_chars:
        raise invalid("stop", f"a stop string has {longest} characters; the limit is {limits.max_stop_chars}")


def from_response_format(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """OpenAI's (and TGI's) `response_format` as `SamplingParams.structured_outputs`."""
    match response_format:
        case None | TextFormat():
            return None
        case JsonObjectFormat(value=None):
            return {"json_object": True}
        case JsonObjectFormat(value=schema) | JsonFormat(value=schema):
            return {"json": schema}
        case JsonSchemaFormat(json_schema=spec):
            return {"json": spec.schema}
        case RegexFormat(value=regex):
            return {"regex": regex}
        case GrammarFormat(grammar=grammar):
            return {"grammar": grammar}


def structured_outputs(fields: SamplingFields, response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """The one constraint that a request asks for, by any of its names. Raises 400 where it asks for several."""
    asked: dict[str, dict[str, Any]] = {}
    if (formatted := from_response_format(response_format)) is not None:
        asked["response_format"] = formatted
    if fields.structured_outputs is not None:
        asked["structured_outputs"] = msgspec.to_builtins(fields.structured_outputs)
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(fields, f"guided_{name}")) is not None:
            asked[f"guided_{name}"] = {name: value}
    if len(asked) > 1:
        raise invalid(list(asked)[-1], f"only one of {', '.join(asked)} can constrain the output")
    return next(iter(asked.values()), None)


def to_params(
    fields: SamplingFields,
    model: ServedModel,
    limits: RequestLimits,
    *,
    max_tokens: int,
    logprobs: int | None,
    best_of: int | None,
    structured: dict[str, Any] | None,
) -> SamplingParams:
    """`SamplingParams`: what the request says, else what the model's makers recommend, else the defaults.

    Raises `RequestError` or `ApiError` (400) that names the field.
    """
    chosen: dict[str, Any] = {}
    for name in _SHARED:
        if (value := getattr(fields, name)) is not None:
            chosen[name] = value
    chosen.pop("truncate_prompt_tokens", None)  # done already: the ids are cut before they are counted
    params = msgspec.structs.replace(
        model.default_sampling,
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        best_of=best_of,
        structured_outputs=structured,
    )
    if fields.use_beam_search:
        width = best_of or params.n
        params = msgspec.structs.replace(params, beam_width=width, best_of=None, temperature=0.0)
    check_limits(params, limits)
    return params
