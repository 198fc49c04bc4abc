"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import CompletionOutput, RequestOutput
from runtime.server import generation, logs, prompts, sse
from runtime.server.body import string_of
from runtime.server.chat_output import Message, ToolChoice
from runtime.server.conversation import Conversation, Wish, prepare
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Dialect, Kind
from runtime.server.parsers.base import Content, Event, Reasoning, ToolArguments, ToolStart
from runtime.server.protocol.anthropic import (
    AnyChoice,
    ContentBlock,
    CountTokensRequest,
    CountTokensResponse,
    MessageResponse,
    MessagesRequest,
    MessagesUsage,
    NamedChoice,
    NoneChoice,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from runtime.server.protocol.chat import FunctionName, FunctionSpec, NamedTool, Tool
from runtime.server.protocol.sampling import SamplingFields
from runtime.server.routes.common import accept, json_response, log_usage, stream_response, usage
from runtime.server.sse import unless_disconnected

router = APIRouter(tags=["Anthropic"])


@router.post(
    "/v1/messages",
    **describe(body=MessagesRequest, returns=MessageResponse, streams=True, dialect=Dialect.ANTHROPIC),
)
async def create_message(request: Request) -> Response:
    """Answer a chat."""
    state, body = await accept(request, MessagesRequest)
    model = state.registry.get(body.model)
    user = (body.metadata or {}).get("user_id")
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        user=user if isinstance(user, str) else None,
    )
    choice, parallel = tool_choice(body)
    wish = Wish(
        route="messages",
        messages=messages(body),
        fields=fields,
        max_tokens=body.max_tokens,
        tools=tools(body),
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    talk = await prepare(state, model, wish)
    answer = Answer(talk)
    if body.stream:
        return stream_response(request, answer.events(request), _error_event)
    with state.admission.admit(1):
        (result,) = await unless_disconnected(request, generation.collect([talk.stream()]))
    response = answer.whole(result)
    log_usage(request, usage(response.usage.input_tokens, response.usage.output_tokens))
    return json_response(response)


@router.post(
    "/v1/messages/count_tokens",
    **describe(body=CountTokensRequest, returns=CountTokensResponse, dialect=Dialect.ANTHROPIC),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens a chat takes."""
    state, body = await accept(request, CountTokensRequest, places=0)
    model = state.registry.get(body.model)
    _, ids = await prompts.render_chat(model, messages(body), tools=tools(body))
    return json_response(CountTokensResponse(len(ids)))


def _error_event(error: ApiError) -> bytes:
    return sse.event("error", error.body(Dialect.ANTHROPIC, logs.request_id.get()))


def tools(body: CountTokensRequest) -> list[Tool] | None:
    """Their tools as ours. Raises 400 for the tools that Anthropic runs itself (web search and the like)."""
    if not body.tools:
        return None
    made = []
    for number, tool in enumerate(body.tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{number}].type"
            raise ApiError(Kind.INVALID, f"`{param}`: {tool.type!r} is not run by this server", param=param)
        spec = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.input_schema)
        made.append(Tool(function=spec))
    return made


def tool_choice(body: CountTokensRequest) -> tuple[ToolChoice, bool]:
    """(our tool choice, whether calls may be several)."""
    given = body.tool_choice
    parallel = not getattr(given, "disable_parallel_tool_use", False)
    match given:
        case NoneChoice():
            return "none", parallel
        case AnyChoice():
            return "required", parallel
        case NamedChoice(name=name):
            return NamedTool(function=FunctionName(name=name)), parallel
        case _:
            return ("auto" if body.tools else None), parallel


def messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Their messages as a chat template reads them. Raises 400 for a block of no kind that we know."""
    made: list[dict[str, Any]] = []
    if body.system is not None:
        system = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        made.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            made.append({"role": message.role, "content": message.content})
            continue
        made += _from_blocks(message.role, message.content, f"messages[{number}].content")
    return made


def _from_blocks(role: str, blocks: list[dict[str, Any]], at: str) -> list[dict[str, Any]]:
    """One message; tool results become messages of their own before it."""
    results, texts, thoughts, calls = [], [], [], []
    for number, block in enumerate(blocks):
        where = f"{at}[{number}]"
        match block.get("type"):
            case "text":
                texts.append(string_of(block, "text", where))
            case "thinking" if role == "assistant":
                thoughts.append(string_of(block, "thinking", where))
            case "redacted_thinking" if role == "assistant":
                continue
            case "tool_use" if role == "assistant":
                name, arguments = string_of(block, "name", where), block.get("input")
                if not isinstance(arguments, dict):
                    raise ApiError(Kind.INVALID, f"`{where}.input` must be an object", param=f"{where}.input")
                function = {"name": name, "arguments": arguments}
                calls.append({"id": string_of(block, "id", where), "type": "function", "function": function})
            case "tool_result" if role == "user":
                content = _result_text(block.get("content"), f"{where}.content")
                call_id = string_of(block, "tool_use_id", where)
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case other:
                param = f"{where}.type"
                message = f"`{param}`: {other!r} blocks are not read from the role {role!r} by this server"
                raise ApiError(Kind.INVALID, message, param=param)
    made = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls  # type: ignore[assignment]
    return [*results, made] if texts or calls or not results else results


def _result_text(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(Kind.INVALID, f"`{at}` must be a string or a list of blocks", param=at)
    return "\n".join(string_of(block, "text", f"{at}[{number}]") for number, block in enumerate(content))


class Answer:
    """One message being made, whole or as events."""

    def __init__(self, talk: Conversation):
        self.talk = talk
        self.id = generation.new_id("msg_")

    def message(self, content: list[ContentBlock], sequence: CompletionOutput | None, used: MessagesUsage, calls: int):
        reason, stop = (None, None) if sequence is None else stop_reason(sequence, calls)
        return MessageResponse(
            id=self.id,
            model=self.talk.model.name,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=used,
        )

    def usage(self, output_tokens: int, cached: int) -> MessagesUsage:
        # Anthropic counts what was read from the cache apart from the input.
        uncached = len(self.talk.prompt_ids) - cached
        return MessagesUsage(input_tokens=uncached, output_tokens=output_tokens, cache_read_input_tokens=cached)

    def whole(self, result: RequestOutput) -> MessageResponse:
        sequence = result.outputs[0]
        parser, said = self.talk.output.make_parser(), Message()
        said.add(parser.feed(sequence.text))
        said.add(parser.finish())
        blocks: list[ContentBlock] = []
        if said.reasoning:
            blocks.append(ThinkingBlock(thinking=said.reasoning))
        if said.content or not said.calls:
            blocks.append(TextBlock(text=said.content))
        blocks += [ToolUseBlock(id=call.id, name=call.name, input=_object(call.arguments)) for call in said.calls]
        used = self.usage(len(sequence.token_ids), result.num_cached_tokens)
        return self.message(blocks, sequence, used, len(said.calls))

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """`message_start`, the blocks with their deltas, `message_delta`, `message_stop`."""
        blocks = BlockStream()
        parser = self.talk.output.make_parser()
        output_tokens = cached = 0
        last: CompletionOutput | None = None
        started = False
        with self.talk.state.admission.admit(1):
            async with aclosing(self.talk.stream()) as deltas:
                async for output in deltas:
                    cached = output.num_cached_tokens
                    chunks = []
                    if not started:
                        started = True
                        opening = self.message([], None, self.usage(0, cached), 0)
                        chunks.append(sse.event("message_start", {"type": "message_start", "message": opening}))
                    for sequence in output.outputs:
                        last = sequence
                        output_tokens += len(sequence.token_ids)
                        chunks += [blocks.event(event) for event in parser.feed(sequence.text)]
                    if any(chunks):
                        yield b"".join(chunks)
        tail = [blocks.event(event) for event in parser.finish()]
        if last is not None:
            reason, stop = stop_reason(last, blocks.calls)
            ended = {"stop_reason": reason, "stop_sequence": stop}
            used = self.usage(output_tokens, cached)
            tail += [
                blocks.close(),
                sse.event("message_delta", {"type": "message_delta", "delta": ended, "usage": used}),
                sse.event("message_stop", {"type": "message_stop"}),
            ]
        log_usage(request, usage(len(self.talk.prompt_ids), output_tokens))
        yield b"".join(tail)


class BlockStream:
    """Parser events as content blocks: a block opens with the first event of its kind and closes with the next kind."""

    def __init__(self) -> None:
        self.index = -1
        self.kind: str | None = None
        self.calls = 0

    def event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                opened = self._open("text", {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolStart(call_id, name):
                self.calls += 1
                closed = self.close()
                return closed + self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolArguments(text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self.kind == kind:
            return b""
        closed = self.close()
        self.kind = kind
        self.index += 1
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return closed + sse.event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse.event("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": delta})

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self.kind is None:
            return b""
        self.kind = None
        return sse.event("content_block_stop", {"type": "content_block_stop", "index": self.index})


def stop_reason(sequence: CompletionOutput, calls: int) -> tuple[StopReason, str | None]:
    """(Anthropic's stop reason, the stop sequence that ended it)."""
    if sequence.finish_reason == "length":
        return "max_tokens", None
    if calls:
        return "tool_use", None
    if isinstance(sequence.stop_reason, str):
        return "stop_sequence", sequence.stop_reason
    return "end_turn", None


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; text that was cut off before it was JSON is kept as it is."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
