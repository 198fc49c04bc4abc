"""Reasoning between markers, as `<think> ... </think>`."""

from __future__ import annotations

from runtime.server.parsers.base import Content, Event, Reasoning, split_at


class ThinkParser:
    """Splits what a model thinks from what it says.

    Thinking begins at the very start of the output, or already in the prompt (some templates end with the marker).
    """

    start, end = "<think>", "</think>"

    def __init__(self, prompt: str):
        self._held = ""
        begun = prompt.rstrip().endswith(self.start)
        self._state = "lead" if begun else "start"

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a chat template speaks of this format."""
        return cls.start in template or cls.end in template

    def feed(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        events: list[Event] = []
        if self._state == "start":
            text = self._begin(text)
        if self._state == "lead":  # line breaks between the marker and the thought
            text = text.lstrip("\r\n")
            if text:
                self._state = "reasoning"
        if self._state == "reasoning":
            thought, marker, rest = split_at(text, (self.end,))
            if thought:
                events.append(Reasoning(thought))
            text = rest
            if marker is None:
                self._held = rest
            else:
                self._state = "gap"
        if self._state == "gap":  # the line breaks between thought and answer
            text = text.lstrip()
            if text:
                self._state = "content"
        if self._state == "content" and text:
            events.append(Content(text))
        return events

    def _begin(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(self.start):
            self._state = "lead"
            return stripped[len(self.start) :]
        if self.start.startswith(stripped):
            self._held = text
            return ""
        self._state = "content"
        return text

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._state == "reasoning" else Content(held)]
