"""OpenAI's `/v1/responses`: types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from runtime.server.protocol.chat import FunctionName
from runtime.server.protocol.sampling import JsonObjectFormat, TextFormat

Item = dict[str, Any]


class ResponseSchemaFormat(msgspec.Struct, tag="json_schema", kw_only=True):
    schema: dict[str, Any]
    name: str = "schema"
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat | None = None
    verbosity: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ForcedFunction(FunctionName, kw_only=True):
    type: Literal["function"] = "function"


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Input items are messages, function calls, their outputs, and reasoning; any other type is refused by name."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class OutputText(msgspec.Struct, tag="output_text", kw_only=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text", kw_only=True):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(msgspec.Struct, tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag="reasoning", kw_only=True):
    id: str
    summary: list[Any] = []
    status: ItemStatus
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, tag="function_call", kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, finished or on its way."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig
    reasoning: ReasoningConfig | None = None
    background: bool = False
    metadata: dict[str, str] = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    usage: ResponsesUsage | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True
