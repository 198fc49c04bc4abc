"""Stop strings over a growing text: found wherever they lie in it, and held back while they may still come.

A stop string ends the text at the first character that completes one; of several that end there, the longest counts.
So the result depends on the text alone, never on how it came in pieces. Each string is followed by a Knuth-Morris-Pratt
automaton, O(1) amortised a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopMatch:
    """A stop string and where it begins, counted in characters from the start of the text."""

    string: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.string)


class StopStringMatcher:
    """Follows one sequence's text for all of its stop strings."""

    def __init__(self, strings: Sequence[str]):
        self._strings = sorted(set(strings), key=len, reverse=True)  # the longest first
        self._failures = [_failure_table(string) for string in self._strings]
        self._first_chars = {string[0] for string in self._strings}
        self._matched = [0] * len(self._strings)  # so many of the string's characters end the text
        self._length = 0

    def feed(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Take the next piece of the text; the first match ends the matcher's work. `armed` False ignores matches."""
        if self._first_chars.isdisjoint(text) and not any(self._matched):
            self._length += len(text)
            return None
        for offset, char in enumerate(text):
            found = self._step(char)
            if found is not None and armed:
                end = self._length + offset + 1
                return StopMatch(found, end - len(found))
        self._length += len(text)
        return None

    def _step(self, char: str) -> str | None:
        found = None
        for i, string in enumerate(self._strings):
            matched, failures = self._matched[i], self._failures[i]
            while matched and string[matched] != char:
                matched = failures[matched - 1]
            if string[matched] == char:
                matched += 1
            if matched == len(string):
                found = found or string
                matched = failures[matched - 1]
            self._matched[i] = matched
        return found

    @property
    def held(self) -> int:
        """How many of the text's last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)


def _failure_table(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    matched = 0
    for i in range(1, len(string)):
        while matched and string[i] != string[matched]:
            matched = table[matched - 1]
        if string[i] == string[matched]:
            matched += 1
        table[i] = matched
    return table


class StopStringFilter:
    """What may be sent of a sequence's text, token by token.

    A token's text leaves whole or not at all, so that a marker such as `</think>` is never sent in two parts because
    its last character might begin a stop string.
    """

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0):
        self._matcher = StopStringMatcher(strings) if strings else None
        self._include = include_in_output
        self._min_tokens = min_tokens  # text of the first so many tokens completes no stop string
        self._num_tokens = 0
        self._pending: list[str] = []  # the texts of tokens that are held
        self._length = 0  # of all text fed
        self.match: StopMatch | None = None

    def feed(self, text: str, *, num_tokens: int = 1) -> str:
        """Take the text of the next token ("" too) and return what may be sent. Look at `match` afterwards."""
        self._num_tokens += num_tokens
        if self._matcher is None:
            return text
        if not text:
            return ""
        self._pending.append(text)
        self._length += len(text)
        self.match = self._matcher.feed(text, armed=self._num_tokens > self._min_tokens)
        if self.match is not None:
            end = self.match.end if self._include else self.match.start
            pending = self.flush()
            return pending[: len(pending) - (self._length - end)]
        return self._release(self._matcher.held)

    def flush(self) -> str:
        """What is held, once nothing can follow."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def _release(self, num_held: int) -> str:
        """The pending texts before the one in which the last `num_held` characters begin."""
        keep = len(self._pending)
        while num_held > 0:
            keep -= 1
            num_held -= len(self._pending[keep])
        sent = "".join(self._pending[:keep])
        del self._pending[:keep]
        return sent
