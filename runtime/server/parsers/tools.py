"""Tool calls in the formats of the common families, and in the JSON that `tool_choice` enforces."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection

from runtime.server.parsers.base import Content, Event, ToolArguments, ToolStart, new_call_id, split_at
from runtime.server.parsers.call_reader import CallReader, ValueReader


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
        found, self._text = reader.feed(self._text)
        events += found
        if reader.failed:
            if reader.name is None:  # it was content, and may hold the next marker
                events.append(Content(self.start))
            self._reader = None
            return True
        if reader.done:
            self._reader, self._closing, self._called = None, True, True
        return reader.done

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

    def __init__(self, tools: Collection[str] = (), *, skipped: str = ""):
        self._reader: CallReader | None = None
        self._skipped = skipped  # what stood before this call, for the case that it is none
        self._called = False
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
            found, text = self._reader.feed(text)
            events += found
            if self._reader.failed:
                self._plain = True
                text = self._skipped + text if self._reader.name is None else text
            elif self._reader.done:
                self._reader, self._skipped, self._called = None, "", True
        return events

    def finish(self) -> list[Event]:
        reader, self._reader = self._reader, None
        if self._plain or (self._called if reader is None else reader.name is not None):
            return []
        text = self._skipped + (reader.raw if reader is not None else "")
        return [Content(text)] if text else []


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
        found, self._text = self._reader.feed(self._text)
        events += found
        if self._reader.failed:
            self._give_up(self._text if self._reader.name is not None else self._prefix + self._text, events)
            return False
        if not self._reader.done:
            return False
        self._reader, self._called = None, True
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
        stripped = rest.lstrip()
        if stripped.startswith("["):
            self._text, self._list = "", _MistralList(skipped=marker + rest[: -len(stripped)])
            events += self._list.feed(stripped)
            return False
        if head := _MISTRAL_HEAD.match(rest):
            events.append(ToolStart(_mistral_id(), head[1]))
            self._text, self._value = rest[head.end() - 1 :], ValueReader()
            return True
        if _MISTRAL_MAYBE.fullmatch(rest):
            self._text = marker + rest
            return False
        events.append(Content(marker))
        self._text = rest
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


# A call's name, perhaps `[CALL_ID]...` and `[ARGS]`, and its arguments' first character; and what may become that.
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[[^{]*)?\{")
_MISTRAL_MAYBE = re.compile(r"\s*[\w.-]*\s*(?:\[[^{]*)?")


class _MistralList(JsonListParser):
    def call_id(self) -> str:
        return _mistral_id()


def _mistral_id() -> str:
    # Mistral's templates refuse any other form when the call comes back in the history.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
