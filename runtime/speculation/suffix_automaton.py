"""A suffix automaton that grows a token at a time (Blumer et al. 1985): every piece of a text, in linear space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0
# How far up a new token's occurrences are counted. In a text that repeats itself the way to the root is as long as the
# text; what is far up there are short endings, which no draft goes by.
_COUNTED = 24


class SuffixAutomaton:
    """States stand for sets of pieces of the text that end at the same places.

    `length[s]`: of a state's longest piece. `link[s]`: the state of its longest ending that also stands elsewhere.
    `count[s]`: how often its pieces stand in the text, as far as they were counted.
    """

    __slots__ = ("count", "follow", "last", "length", "link")

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last = ROOT

    def __len__(self) -> int:
        return len(self.link)

    def restart(self) -> None:
        """Begin another text: no piece spans the two."""
        self.last = ROOT

    def append(self, token_id: int) -> None:
        """The text goes on with `token_id`. Amortized constant time."""
        follow, link, length = self.follow, self.link, self.length
        known = follow[self.last].get(token_id)
        if known is not None:  # a second text that begins like an earlier one
            self.last = known if length[known] == length[self.last] + 1 else self._clone(known, self.last, token_id)
        else:
            new = self._new(length[self.last] + 1, {})
            state = self.last
            while state != -1 and token_id not in follow[state]:
                follow[state][token_id] = new
                state = link[state]
            if state == -1:
                link[new] = ROOT
            else:
                target = follow[state][token_id]
                link[new] = target if length[target] == length[state] + 1 else self._clone(target, state, token_id)
            self.last = new
        state = self.last
        for _ in range(_COUNTED):
            if state <= ROOT:
                break
            self.count[state] += 1
            state = link[state]

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.append(token_id)

    def _new(self, length: int, follow: dict[int, int]) -> int:
        self.follow.append(follow)
        self.link.append(ROOT)
        self.length.append(length)
        self.count.append(0)
        return len(self.link) - 1

    def _clone(self, target: int, state: int, token_id: int) -> int:
        """Split `target`: the pieces that `state` leads to with `token_id` get a state of their own."""
        clone = self._new(self.length[state] + 1, self.follow[target].copy())
        self.link[clone], self.count[clone] = self.link[target], self.count[target]
        self.link[target] = clone
        while state != -1 and self.follow[state].get(token_id) == target:
            self.follow[state][token_id] = clone
            state = self.link[state]
        return clone

    def earlier(self) -> tuple[int, int]:
        """The state and length of the text's longest ending that stands in it elsewhere too."""
        state = self.link[self.last] if self.last != ROOT else ROOT
        return state, self.length[state]

    def match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The state and length of the longest ending of `token_ids` that stands in the text."""
        state, matched = ROOT, 0
        for token_id in token_ids:
            while state != ROOT and token_id not in self.follow[state]:
                state = self.link[state]
                matched = self.length[state]
            if token_id in self.follow[state]:
                state = self.follow[state][token_id]
                matched += 1
        return state, matched

    def likeliest(self, state: int, most: int, least_share: float) -> tuple[list[int], float]:
        """The most frequent way on from `state`, at most `most` tokens; and how often it was taken, in all, of 1.

        It ends where that share would fall below `least_share`.
        """
        found: list[int] = []
        share = 1.0
        while len(found) < most:
            ways = self.follow[state]
            if not ways:
                break
            counts = [(self.count[target], -token_id, target) for token_id, target in ways.items()]
            best, negative, target = max(counts)
            share *= best / max(1, sum(count for count, _, _ in counts))
            if share < least_share:
                break
            found.append(-negative)
            state = target
        return found, share
