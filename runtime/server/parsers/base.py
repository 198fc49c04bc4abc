"""What a parser is: text in, as it streams; reasoning, content and tool calls out.

A parser never needs a whole answer: it holds back only what may still become a marker, and gives it back whole when it
does not. So the streamed and the unstreamed answer are made by the same code.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins. What follows until the next one are its arguments."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the current call's arguments, as JSON text."""

    text: str


Event = Content | Reasoning | ToolStart | ToolArguments


class TextParser(Protocol):
    """Reads one sequence's text. `feed` and `finish` return what became certain."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text has ended: what was held back is content after all."""
        ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def held_length(text: str, markers: tuple[str, ...]) -> int:
    """How many last characters of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def split_at(text: str, markers: tuple[str, ...]) -> tuple[str, str | None, str]:
    """(before, marker, after) at the first marker; (safe, None, held) where there is none yet."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    if found:
        position, marker = min(found)
        return text[:position], marker, text[position + len(marker) :]
    keep = len(text) - held_length(text, markers)
    return text[:keep], None, text[keep:]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
