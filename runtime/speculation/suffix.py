"""Drafts by suffix automaton (SuffixDecoding, Oliaro et al. 2024): the most frequent way on after the longest known
ending of the text, in the request's own text, or in past outputs where those know a longer one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Listed

from runtime.sequence import Sequence
from runtime.speculation.ngram import level_of
from runtime.speculation.proposer import Draft
from runtime.speculation.suffix_automaton import SuffixAutomaton

_SHORTEST = 2
# Past outputs are matched with so many of the last tokens.
_PAST_DEPTH = 24
# Tokens indexed a step over all sequences (about 3 us each): a long prompt is taken in over several.
_INDEXED_A_STEP = 2048
# Users with a past of their own (`cache_salt`); the one unused for longest is forgotten first.
_PASTS = 64


class PastOutputs:
    """Automata over about the last `max_tokens` tokens of finished outputs: the present one and the full one before."""

    def __init__(self, max_tokens: int):
        self._most = max(1, max_tokens // 2)
        self._size = 0
        self._present = SuffixAutomaton()
        self._before: SuffixAutomaton | None = None

    def add(self, token_ids: Listed[int]) -> None:
        if self._size >= self._most:
            self._before, self._present, self._size = self._present, SuffixAutomaton(), 0
        self._present.restart()
        self._present.extend(token_ids[: self._most])
        self._size += len(token_ids)

    def match(self, token_ids: Listed[int]) -> tuple[SuffixAutomaton, int, int]:
        """The automaton that knows the longest ending of `token_ids`, its state and the length."""
        found = (self._present, *self._present.match(token_ids))
        if self._before is not None:
            before = (self._before, *self._before.match(token_ids))
            if before[2] > found[2]:
                return before
        return found


class SuffixProposer:
    """An automaton for each sequence, over its prompt and output, built as it goes."""

    name = "suffix"
    is_free = True

    def __init__(self, min_token_prob: float, past_tokens: int = 0):
        self._least_share = min_token_prob
        self._past_tokens = past_tokens
        self._own: dict[Sequence, tuple[SuffixAutomaton, int]] = {}  # and the tokens that it holds
        self._pasts: OrderedDict[str | None, PastOutputs] = OrderedDict()

    def propose(self, wanted: Listed[tuple[Sequence, int]]) -> list[Draft | None]:
        room = _INDEXED_A_STEP
        drafts: list[Draft | None] = []
        for sequence, most in wanted:
            own, known = self._own.get(sequence, (None, 0))
            if own is None:
                own = SuffixAutomaton()
            taken = min(room, len(sequence.tokens) - known)
            own.extend(sequence.tokens[known : known + taken])
            room -= taken
            self._own[sequence] = own, known + taken
            drafts.append(self._draft(sequence, own, most) if known + taken == len(sequence.tokens) else None)
        return drafts

    def _draft(self, sequence: Sequence, own: SuffixAutomaton, most: int) -> Draft | None:
        automaton, (state, length) = own, own.earlier()
        past = self._pasts.get(sequence.request.message.cache_salt)
        if past is not None and length < _PAST_DEPTH:
            found = past.match(sequence.tokens[-_PAST_DEPTH:])
            if found[2] > length:
                automaton, state, length = found
        if length < _SHORTEST:
            return None
        token_ids, _ = automaton.likeliest(state, most, self._least_share)
        return Draft(token_ids, source=self.name, level=level_of(length)) if token_ids else None

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        self._own.pop(sequence, None)
        if not complete or not self._past_tokens:
            return
        salt = sequence.request.message.cache_salt  # what one user may not share, may not show in drafts' speed either
        past = self._pasts.pop(salt, None)
        if past is None:
            past = PastOutputs(self._past_tokens)
        past.add(sequence.output_token_ids)
        self._pasts[salt] = past
        while len(self._pasts) > _PASTS:
            self._pasts.popitem(last=False)
