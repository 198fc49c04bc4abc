"""Parsers of model output, chosen by name or by the look of the chat template. Add one by adding it to its table."""

from __future__ import annotations

from collections.abc import Collection

from runtime.errors import PlancastError
from runtime.server.parsers.base import Content, Event, PlainParser, TextParser
from runtime.server.parsers.reasoning import ThinkParser
from runtime.server.parsers.tools import HermesParser, JsonListParser, Llama3Parser, MistralParser, NamedToolParser

TOOL_PARSERS = {"hermes": HermesParser, "mistral": MistralParser, "llama3": Llama3Parser}
REASONING_PARSERS = {"think": ThinkParser}

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Chain",
    "Content",
    "Event",
    "JsonListParser",
    "NamedToolParser",
    "PlainParser",
    "TextParser",
    "check_choice",
    "pick",
]


def check_choice(name: str, table: dict[str, type], option: str) -> None:
    """Raises `PlancastError` where `name` is neither auto, none, nor in the table."""
    if name not in ("auto", "none", *table):
        raise PlancastError(f"{option} is {name!r}: choose auto, none, {', '.join(table)}")


def pick(table: dict[str, type], choice: str, template: str) -> type | None:
    """The parser called `choice`; for auto the first whose format the template speaks; None for none."""
    if choice == "auto":
        return next((parser for parser in table.values() if parser.fits(template)), None)
    return table.get(choice)


class Chain:
    """Reasoning first; what is content after it goes on to the tool parser."""

    def __init__(self, reasoning: TextParser, tools: TextParser):
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        return self._pass_on(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        return [*self._pass_on(self._reasoning.finish()), *self._tools.finish()]

    def _pass_on(self, events: Collection[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            passed += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return passed
