"""Reads tool calls written as JSON while they are being written: the name once, then the arguments as they grow."""

from __future__ import annotations

import json
from collections.abc import Callable

from runtime.server.parsers.base import Event, ToolArguments, ToolStart, new_call_id

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class _NotACallError(ValueError):
    """The text is not a call."""


class ValueReader:
    """Finds the end of one JSON value. Not a validator: it only keeps count of strings and brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._started = False

    def take(self, text: str) -> tuple[str, bool]:
        """What of `text` belongs to the value, and whether the value is complete."""
        for position, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return text[: position + 1], True
            elif char == '"':
                self._in_string = self._started = True
            elif char in "{[":
                self._depth += 1
                self._started = True
            elif char in "}]":
                if not self._depth:
                    return text[:position], True  # a bare number or word, ended by its container
                self._depth -= 1
                if not self._depth:
                    return text[: position + 1], True
            elif char == "," and not self._depth:
                return text[:position], True
            elif char not in _SPACE:
                self._started = True
            elif self._started and not self._depth:
                return text[:position], True
        return text, False


class CallReader:
    """Reads one object `{"name": ..., "arguments": {...}}` (or `parameters`), its members in any order.

    It ends `done`, or `failed` where the text is no such object or `accepts` refuses the name.
    """

    def __init__(self, accepts: Callable[[str], bool] = lambda name: True, call_id: Callable[[], str] = new_call_id):
        self._accepts = accepts
        self._call_id = call_id
        self._buffer = ""
        self._state = "open"  # open | key | colon | value | next
        self._key = ""
        self._value = ValueReader()
        self._read = ""  # of the current value
        self._early = ""  # arguments that came before the name
        self.raw = ""  # everything read so far
        self.name: str | None = None
        self.done = False
        self.failed = False

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Events, and the text that is not the call's: what follows it, or what turned out to be none.

        A call that was told of and then fails keeps what it had; one that fails before gives all its text back.
        """
        self._buffer += text
        self.raw += text
        events: list[Event] = []
        try:
            while not self.done and self._step(events):
                pass
        except _NotACallError:
            self.failed = True
            return events, self._buffer if self.name is not None else self.raw
        return events, self._buffer if self.done else ""

    def _step(self, events: list[Event]) -> bool:
        """Go on by one token of the grammar. False: more text is needed."""
        if self._state == "value":
            return self._read_value(events)
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        char = self._buffer[0]
        if self._state == "key" and char == '"':
            return self._read_key()
        following = {
            ("open", "{"): "key",
            ("key", "}"): "done",
            ("colon", ":"): "value",
            ("next", ","): "key",
            ("next", "}"): "done",
        }.get((self._state, char))
        if following is None:
            raise _NotACallError(f"unexpected {char!r}")
        self._buffer = self._buffer[1:]
        self._state = following
        if following == "done":
            self._end(events)
        return True

    def _read_key(self) -> bool:
        reader = ValueReader()
        key, complete = reader.take(self._buffer)
        if not complete:
            return False
        self._buffer = self._buffer[len(key) :]
        self._key = _decode(key)
        self._state, self._value, self._read = "colon", ValueReader(), ""
        return True

    def _read_value(self, events: list[Event]) -> bool:
        if not self._read:
            self._buffer = self._buffer.lstrip(_SPACE)
        text, complete = self._value.take(self._buffer)
        self._buffer = self._buffer[len(text) :]
        self._read += text
        # Arguments given as an object stream; as a string (JSON within JSON) they wait for their end.
        if self._key in _ARGUMENTS and text and not self._read.startswith('"'):
            self._arguments(text, events)
        if complete:
            self._state = "next"
            if self._key == "name":
                self._named(_decode(self._read), events)
            elif self._key in _ARGUMENTS and self._read.startswith('"'):
                self._arguments(_decode(self._read), events)
        return complete

    def _named(self, name: object, events: list[Event]) -> None:
        if not isinstance(name, str) or not self._accepts(name):
            raise _NotACallError(f"no tool is called {name!r}")
        self.name = name
        events.append(ToolStart(self._call_id(), name))
        if self._early:
            events.append(ToolArguments(self._early))
            self._early = ""

    def _arguments(self, text: str, events: list[Event]) -> None:
        if self.name is None:
            self._early += text
        elif text:
            events.append(ToolArguments(text))

    def _end(self, events: list[Event]) -> None:
        if self.name is None:
            raise _NotACallError("the object has no name")
        self.done = True


def _decode(text: str) -> str:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _NotACallError(str(error)) from None
