"""What every generating route begins with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import RequestOutput
from runtime.server.body import decode, read_body
from runtime.server.errors import ApiError, Dialect
from runtime.server.protocol.sampling import CompletionTokensDetails, PromptTokensDetails, Usage
from runtime.server.sse import DONE, SseResponse, data
from runtime.server.state import ServerState, log_extras, state_of

T = TypeVar("T")


async def accept(request: Request, kind: type[T], *, places: int = 1) -> tuple[ServerState, T]:
    """The server's state and the decoded body. Raises `ApiError` 4xx.

    Where there are no `places`, the request is refused before anything is spent on reading it.
    """
    state = state_of(request)
    state.admission.check(places)
    return state, decode(await read_body(request, state.config.limits.max_body_bytes), kind)


def json_response(message: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(message), headers=headers, media_type="application/json")


def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes] | None = None
) -> SseResponse:
    """`events` as server-sent events. What fails before the first one is answered with its own status."""
    return SseResponse(events, on_error or _openai_error, state_of(request).config.keep_alive_interval)


def _openai_error(error: ApiError) -> bytes:
    return data(error.body(Dialect.OPENAI)) + DONE


def usage_of(results: Sequence[RequestOutput]) -> Usage:
    """Tokens of all prompts and of all their sequences."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    output = sum(len(sequence.token_ids) for result in results for sequence in result.outputs)
    drafted = sum(result.metrics.num_draft_tokens for result in results)
    accepted = sum(result.metrics.num_accepted_tokens for result in results)
    return usage(prompt, output, sum(result.num_cached_tokens for result in results), drafted, accepted)


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, drafted: int = 0, accepted: int = 0
) -> Usage:
    details = CompletionTokensDetails(
        accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
    )
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=details if drafted else msgspec.UNSET,
    )


def log_usage(request: Request, counted: Usage) -> None:
    """Put the counts into the request's log line."""
    log_extras(request, prompt_tokens=counted.prompt_tokens, completion_tokens=counted.completion_tokens)
