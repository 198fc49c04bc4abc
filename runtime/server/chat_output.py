"""A chat's output, whichever protocol asked: text through the parsers, collected whole or told piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from runtime.server import parsers
from runtime.server.config import ServerConfig
from runtime.server.errors import ApiError, Kind
from runtime.server.parsers.base import Content, Event, Reasoning, TextParser, ToolArguments, ToolStart
from runtime.server.protocol.chat import NamedTool, Tool
from runtime.server.registry import ServedModel

ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """What one sequence said."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolStart(call_id, name):
                    self.calls.append(Call(call_id, name))
                case ToolArguments(text):
                    self.calls[-1].arguments += text


@dataclass(slots=True)
class OutputFormat:
    """How a chat's output is to be constrained and read."""

    make_parser: Callable[[], TextParser]
    is_plain: bool  # nothing is parsed: deltas go out as they come
    structured: dict[str, Any] | None  # what the tool choice enforces
    keep_special_tokens: bool  # the tool format is written with special tokens
    offered: list[Tool]  # what the template shows to the model


def output_format(
    model: ServedModel,
    config: ServerConfig,
    *,
    tools: list[Tool] | None,
    tool_choice: ToolChoice,
    parallel: bool,
    prompt: str,
) -> OutputFormat:
    """Choose parsers by configuration, chat template, and tool choice. `prompt` is the rendered chat."""
    tools = tools or []
    chat_template = model.engine.chat_template
    template = "\n".join(chat_template.sources.values()) if chat_template is not None else ""
    forced = forced_schema(tools, tool_choice, parallel)
    thinking = parsers.pick(parsers.REASONING_PARSERS, config.reasoning_parser, template)
    speaking = parsers.pick(parsers.TOOL_PARSERS, config.tool_call_parser, template)
    names = frozenset(tool.function.name for tool in tools)
    make_tools: Callable[[], TextParser] = parsers.PlainParser
    keep_special = False
    if isinstance(tool_choice, NamedTool):
        make_tools = partial(parsers.NamedToolParser, tool_choice.function.name)
    elif tool_choice == "required":
        make_tools = parsers.JsonListParser
    elif tools and tool_choice != "none" and speaking is not None:
        keep_special = speaking.needs_special_tokens
        make_tools = partial(speaking, names)
    if thinking is None or forced is not None:  # a grammar binds from the first token: there is no thinking
        return OutputFormat(make_tools, make_tools is parsers.PlainParser, forced, keep_special, tools)

    def make_chain() -> TextParser:
        return parsers.Chain(thinking(prompt), make_tools())

    return OutputFormat(make_chain, False, forced, keep_special, tools)


def forced_schema(tools: list[Tool], choice: ToolChoice, parallel: bool) -> dict[str, Any] | None:
    """The structured output that a tool choice enforces. Raises 400 where it names no given tool."""
    if choice is None or choice in ("none", "auto"):
        return None
    if not tools:
        raise ApiError(Kind.INVALID, "`tool_choice` needs `tools` to choose from", param="tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = next((tool for tool in tools if tool.function.name == name), None)
        if chosen is None:
            held = ", ".join(tool.function.name for tool in tools)
            message = f"`tool_choice.function.name` is {name!r}, which is none of the tools: {held}"
            raise ApiError(Kind.INVALID, message, param="tool_choice.function.name")
        return {"json": _parameters(chosen)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": _parameters(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    definitions = _lift_definitions(tools)
    return {"json": schema | ({"$defs": definitions} if definitions else {})}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _lift_definitions(tools: list[Tool]) -> dict[str, Any]:
    """`$defs` of every tool, lifted to where `#/$defs/...` finds them. One name must mean one thing."""
    lifted: dict[str, Any] = {}
    for tool in tools:
        for name, schema in (_parameters(tool).get("$defs") or {}).items():
            if lifted.setdefault(name, schema) != schema:
                message = f"two tools define `$defs/{name}` differently: rename one of them"
                raise ApiError(Kind.INVALID, message, param="tools")
    return lifted


def finish_reason(reason: str | None, made_calls: bool, choice: ToolChoice) -> str | None:
    """OpenAI's: calls that the model chose to make end with `tool_calls`; a named one ends as it ends."""
    return "tool_calls" if reason == "stop" and made_calls and not isinstance(choice, NamedTool) else reason
