"""Anthropic's Messages API: types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Block = dict[str, Any]


class TextBlockParam(msgspec.Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class MessageParam(msgspec.Struct, kw_only=True):
    """Blocks are text, thinking, tool_use and tool_result; any other type is refused by name."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None


class AutoChoice(msgspec.Struct, tag="auto", kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag="any", kw_only=True):
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag="none"):
    pass


class NamedChoice(msgspec.Struct, tag="tool", kw_only=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlockParam] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AutoChoice | AnyChoice | NoneChoice | NamedChoice | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metadata: dict[str, Any] | None = None


class TextBlock(msgspec.Struct, tag="text", kw_only=True):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageResponse(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensResponse(msgspec.Struct):
    input_tokens: int
