"""Tool calls in the formats of the common families, and in the JSON that `tool_choice` enforces."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection

from runtime.server.parsers.base import Content, Event, ToolArguments, ToolStart, new_call_id, split_at
from runtime.server.parsers.call_reader import CallReader, NotACallError, ValueReader


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM3)."""

    needs_special_tokens = False
    start, end = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Collection[str]):
        self._text = ""
        self._reader: CallReader | None = None
        self._closing = False  # the object is read; the closing marker is due
        self._called = False

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.start in template

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._closing:
            return self._close()
        if self._reader is not None:
            return self._read(self._reader, events)
        before, marker, rest = split_at(self._text, (self.start,))
        # Between calls models write line breaks, which are no content.
        if before and not (self._called and before.isspace()):
            events.append(Content(before))
        self._text = rest
        if marker is not None:
            self._reader = CallReader()
        return marker is not None

    def _read(self, reader: CallReader, events: list[Event]) -> bool:
        text, self._text = self._text, ""
        try:
            found, rest = reader.feed(text)
        except NotACallError:
            self._reader = None
            if reader.name is None:  # nothing was told yet: it was content
                events.append(Content(self.start + reader.raw))
            return False
        events += found
        if not reader.done:
            return False
        self._text, self._reader, self._closing, self._called = rest, None, True, True
        return True

    def _close(self) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(self.end):
            self._text = stripped[len(self.end) :]
        elif self.end.startswith(stripped):
            return False
        self._closing = False
        return True

    def finish(self) -> list[Event]:
        text, reader = self._text, self._reader
        self._text, self._reader = "", None
        if reader is not None and reader.name is None:
            text = self.start + reader.raw + text
        elif self._closing or (self._called and text.isspace()):
            text = ""
        return [Content(text)] if text else []


class JsonListParser:
    """`[{"name": ..., "parameters": {...}}, ...]`: what `tool_choice: required` makes the grammar enforce."""

    needs_special_tokens = False
    _between = " \t\r\n[,]"

    def __init__(self, tools: Collection[str] = ()):
        self._reader: CallReader | None = None
        self._skipped = ""  # what stood between the last call and this one
        self._plain = False

    def call_id(self) -> str:
        return new_call_id()

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._plain:
                return [*events, Content(text)]
            if self._reader is None:
                rest = text.lstrip(self._between)
                self._skipped += text[: len(text) - len(rest)]
                text = rest
                if not text:
                    break
                self._reader = CallReader(call_id=self.call_id)
            try:
                found, text = self._reader.feed(text)
            except NotACallError:
                self._plain = True
                raw = self._skipped + self._reader.raw if self._reader.name is None else ""
                return [*events, Content(raw)] if raw else events
            events += found
            if self._reader.done:
                self._reader, self._skipped = None, ""
        return events

    def finish(self) -> list[Event]:
        reader, self._reader = self._reader, None
        unread = not self._plain and reader is not None and reader.name is None
        return [Content(self._skipped + reader.raw)] if unread and reader is not None else []


class NamedToolParser:
    """The whole output is one tool's arguments: what `tool_choice: {"function": {"name": ...}}` enforces."""

    needs_special_tokens = False

    def __init__(self, name: str):
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [ToolArguments(text)]
        if self._name is not None:
            events.insert(0, ToolStart(new_call_id(), self._name))
            self._name = None
        return events

    def finish(self) -> list[Event]:
        return []


class Llama3Parser:
    """`{"name": ..., "parameters": {...}}` from the first character on, `;` between calls (Llama 3.1 and later).

    There are no markers, so an object counts as a call only where its name is one of the given tools.
    """

    needs_special_tokens = True
    tag = "<|python_tag|>"

    def __init__(self, tools: Collection[str]):
        self._tools = tools
        self._text = ""
        self._reader: CallReader | None = None
        self._plain = False
        self._called = False

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.tag in template or ("<|eot_id|>" in template and '"parameters"' in template)

    def feed(self, text: str) -> list[Event]:
        if self._plain:
            return [Content(text)] if text else []
        self._text += text
        events: list[Event] = []
        while not self._plain and self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._reader is None:
            stripped = self._text.lstrip(" \t\r\n;," if self._called else None).removeprefix(self.tag).lstrip()
            if stripped.startswith("{"):
                self._reader = CallReader(self._tools.__contains__)
                self._prefix, self._text = self._text[: -len(stripped)], stripped
            elif self.tag.startswith(stripped):  # nothing yet, or the tag's beginning
                return False
            else:
                self._give_up(self._text, events)
                return False
        text, self._text = self._text, ""
        try:
            found, rest = self._reader.feed(text)
        except NotACallError:
            raw = self._reader.raw if self._reader.name is None else ""
            self._give_up(self._prefix + raw, events)
            return False
        events += found
        if not self._reader.done:
            return False
        self._text, self._reader, self._called = rest, None, True
        return True

    def _give_up(self, text: str, events: list[Event]) -> None:
        self._plain, self._reader, self._text = True, None, ""
        if text:
            events.append(Content(text))

    def finish(self) -> list[Event]:
        text = self._text
        if self._reader is not None and self._reader.name is None:
            text = self._prefix + self._reader.raw
        self._text, self._reader = "", None
        return [Content(text)] if text and not (self._called and text.isspace()) else []


class MistralParser:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or the newer `[TOOL_CALLS]name[ARGS]{...}`."""

    needs_special_tokens = True
    marker, args = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, tools: Collection[str]):
        self._text = ""
        self._list: JsonListParser | None = None
        self._value: ValueReader | None = None

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.marker in template

    def feed(self, text: str) -> list[Event]:
        if self._list is not None:
            return self._list.feed(text)
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._value is not None:
            return self._read_arguments(self._value, events)
        before, marker, rest = split_at(self._text, (self.marker,))
        if before:
            events.append(Content(before))
        if marker is None:
            self._text = rest
            return False
        rest = rest.lstrip()
        if rest.startswith("["):
            self._text, self._list = "", _MistralList()
            events += self._list.feed(rest)
            return False
        brace = rest.find("{")
        if brace < 0:
            self._text = marker + rest
            return False
        name = rest[:brace].partition("[")[0].strip()  # "[ARGS]" or "[CALL_ID]..." may stand between
        if not name:
            events.append(Content(marker + rest))
            self._text = ""
            return False
        events.append(ToolStart(_mistral_id(), name))
        self._text, self._value = rest[brace:], ValueReader()
        return True

    def _read_arguments(self, value: ValueReader, events: list[Event]) -> bool:
        taken, complete = value.take(self._text)
        self._text = self._text[len(taken) :]
        if taken:
            events.append(ToolArguments(taken))
        if complete:
            self._value = None
        return complete

    def finish(self) -> list[Event]:
        if self._list is not None:
            return self._list.finish()
        text, self._text = self._text, ""
        return [Content(text)] if text else []


class _MistralList(JsonListParser):
    def call_id(self) -> str:
        return _mistral_id()


def _mistral_id() -> str:
    # Mistral's templates refuse any other form when the call comes back in the history.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
