"""Prompt lookup (Saxena 2023; vLLM's `ngram`): what followed the last tokens when they last stood in the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listed

from runtime.sequence import Sequence
from runtime.speculation.proposer import Draft

# The match is followed backwards this far: a longer one says no more about what comes next.
_LONGEST = 32


def level_of(match_length: int) -> int:
    """Groups of match lengths: 1, 2, 3, 4, 5-8, 9-16, 17-32, more."""
    return match_length if match_length <= 4 else 2 + (match_length - 1).bit_length()


def lookup(tokens: array[int], smallest: int, largest: int) -> tuple[int, int]:
    """Where the text went on after the latest earlier occurrence of its longest known ending.

    Endings of `largest` down to `smallest` tokens are looked for. Returns (position, length of the match, followed
    backwards beyond `largest`); a length of 0 where there is none.
    """
    data, width, end = tokens.tobytes(), tokens.itemsize, len(tokens)
    for n in range(min(largest, end - 1), smallest - 1, -1):
        ending = data[(end - n) * width :]
        at = data.rfind(ending, 0, len(data) - width)
        while at >= 0 and at % width:  # a find in the middle of a number
            at = data.rfind(ending, 0, at + len(ending) - 1)
        if at >= 0:
            start = at // width
            length = n
            while start > 0 and length < _LONGEST and tokens[start - 1] == tokens[end - length - 1]:
                start -= 1
                length += 1
            return at // width + n, length
    return end, 0


def continuation(tokens: array[int], position: int, count: int) -> list[int]:
    """`count` tokens from `position` on; where the text ends sooner, it repeats itself with that period."""
    found = tokens[position : position + count].tolist()
    period = len(found)
    while len(found) < count:
        found += found[len(found) - period : len(found) - period + count - len(found)]
    return found


class NgramProposer:
    """Looks the last tokens up in the request's own text, prompt and output. Keeps nothing."""

    name = "ngram"
    is_free = True

    def __init__(self, smallest: int, largest: int):
        self.smallest, self.largest = smallest, largest

    def propose(self, wanted: Listed[tuple[Sequence, int]]) -> list[Draft | None]:
        return [self._draft(sequence.tokens, most) for sequence, most in wanted]

    def _draft(self, tokens: array[int], most: int) -> Draft | None:
        position, length = lookup(tokens, self.smallest, self.largest)
        if not length:
            return None
        return Draft(continuation(tokens, position, most), source=self.name, level=level_of(length))

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        pass
