"""OpenAI's `/v1/responses`: create (whole, streamed, or in the background), get, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from time import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.server.body import string_of
from runtime.server.conversation import Wish, prepare
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Kind
from runtime.server.generation import new_id
from runtime.server.protocol.chat import FunctionName, FunctionSpec, NamedTool, Tool
from runtime.server.protocol.responses import (
    DeletedResponse,
    ForcedFunction,
    ResponseObject,
    ResponseSchemaFormat,
    ResponsesRequest,
    TextConfig,
)
from runtime.server.protocol.sampling import JsonObjectFormat, SamplingFields, TextFormat
from runtime.server.responses_run import ResponseRun, tool_call
from runtime.server.responses_store import Stored
from runtime.server.routes.common import accept, json_response, log_usage, stream_response, usage
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState, state_of

router = APIRouter(tags=["OpenAI"])

_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"})


@router.post("/v1/responses", **describe(body=ResponsesRequest, returns=ResponseObject, streams=True))
async def create_response(request: Request) -> Response:
    """Answer an input; `previous_response_id` goes on from a stored answer."""
    state, body = await accept(request, ResponsesRequest)
    if body.background and body.store is False:
        raise ApiError(Kind.INVALID, "`background` needs `store`: the answer is fetched later", param="background")
    stored, run = await _prepare(state, body)
    state.admission.check(1)
    if body.store is not False:
        state.responses.put(stored)
    if body.background:
        stored.task = asyncio.create_task(run.run())
        if body.stream:
            return stream_response(request, stored.follow())
        return json_response(stored.response)
    if body.stream:
        return stream_response(request, _run_and_follow(request, stored, run))
    await unless_disconnected(request, run.run())
    _log(request, stored.response)
    if stored.failure is not None:
        raise stored.failure
    return json_response(stored.response)


@router.get("/v1/responses/{response_id}", **describe(returns=ResponseObject, streams=True, statuses=(400, 404)))
async def get_response(
    request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A stored response; with `stream` its events, after number `starting_after`."""
    stored = state_of(request).responses.get(response_id)
    if stream:
        start = 0 if starting_after is None else max(0, starting_after + 1)
        return stream_response(request, stored.follow(start))
    return json_response(stored.response)


@router.post("/v1/responses/{response_id}/cancel", **describe(returns=ResponseObject, statuses=(400, 404)))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Stop a response that runs in the background."""
    stored = state_of(request).responses.get(response_id)
    if not stored.response.background:
        message = "only a response that was created with `background` can be cancelled"
        raise ApiError(Kind.INVALID, message, param="response_id")
    await _stop(stored)
    return json_response(stored.response)


@router.delete("/v1/responses/{response_id}", **describe(returns=DeletedResponse, statuses=(404,)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response; one that still runs is stopped."""
    await _stop(state_of(request).responses.remove(response_id))
    return json_response(DeletedResponse(id=response_id))


async def _stop(stored: Stored) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)


async def _run_and_follow(request: Request, stored: Stored, run: ResponseRun) -> AsyncGenerator[bytes, None]:
    """The events of a run that lives as long as somebody reads them."""
    task = asyncio.create_task(run.run())
    try:
        async for chunk in stored.follow():
            yield chunk
        await task
        _log(request, stored.response)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log(request: Request, response: ResponseObject) -> None:
    if response.usage is not None:
        log_usage(request, usage(response.usage.input_tokens, response.usage.output_tokens))


async def _prepare(state: ServerState, body: ResponsesRequest) -> tuple[Stored, ResponseRun]:
    """Refuse what cannot be served, with 400 or 404 and the field's name."""
    model = state.registry.get(body.model)
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id, "previous_response_id")
        if not previous.is_over:
            message = f"`previous_response_id`: the response {body.previous_response_id!r} is still being made"
            raise ApiError(Kind.INVALID, message, param="previous_response_id")
        earlier = previous.messages
    messages = [*earlier, *input_messages(body.input)]
    if not messages:
        raise ApiError(Kind.INVALID, "`input` is empty", param="input")
    system = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    text = body.text or TextConfig()
    choice = body.tool_choice
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        user=body.user,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    effort = body.reasoning.effort if body.reasoning is not None else None
    wish = Wish(
        route="responses",
        messages=[*system, *messages],
        fields=fields,
        max_tokens=body.max_output_tokens,
        max_tokens_param="max_output_tokens",
        tools=[
            Tool(function=FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters))
            for tool in body.tools or ()
        ],
        tool_choice=NamedTool(function=FunctionName(name=choice.name))
        if isinstance(choice, ForcedFunction)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structured=_structured(text),
        template_kwargs={"reasoning_effort": effort} if effort is not None else None,
    )
    talk = await prepare(state, model, wish)
    response = ResponseObject(
        id=new_id("resp_"),
        created_at=int(time()),
        status="queued" if body.background else "in_progress",
        model=model.name,
        output=[],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=talk.params.temperature,
        top_p=talk.params.top_p,
        tools=body.tools or [],
        tool_choice=choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=TextConfig(format=text.format or TextFormat()),
        reasoning=body.reasoning,
        background=bool(body.background),
        metadata=body.metadata or {},
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    stored = Stored(response, messages)
    return stored, ResponseRun(stored, talk)


def _structured(text: TextConfig) -> dict[str, Any] | None:
    match text.format:
        case ResponseSchemaFormat(schema=schema):
            return {"json": schema}
        case JsonObjectFormat():
            return {"json_object": True}
        case _:
            return None


def input_messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as a chat template reads them. Raises 400 for an item of no kind that we know."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for number, item in enumerate(given):
        at = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                message = {"role": string_of(item, "role", at), "content": _text(item.get("content"), f"{at}.content")}
                if message["role"] == "assistant" and thoughts:
                    message["reasoning_content"], thoughts = thoughts, ""
                messages.append(message)
            case "function_call":
                call = tool_call(
                    string_of(item, "call_id", at), string_of(item, "name", at), string_of(item, "arguments", at)
                )
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output"), f"{at}.output")
                call_id = string_of(item, "call_id", at)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                thoughts = _text(item.get("content"), f"{at}.content")
            case other:
                param = f"{at}.type"
                raise ApiError(Kind.INVALID, f"`{param}`: {other!r} items are not read by this server", param=param)
    return messages


def _text(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(Kind.INVALID, f"`{at}` must be a string or a list of parts", param=at)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_TYPES:
            param = f"{at}[{number}].type"
            raise ApiError(Kind.INVALID, f"`{param}`: {kind!r} parts are not read by this model", param=param)
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", f"{at}[{number}]"))
    return "\n".join(texts)
