"""Drafts from text: prompt lookup and the suffix automaton, against what a plain search finds."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
from core_driver import make_request
from hypothesis import given, settings

from runtime.sequence import Request, Sequence
from runtime.speculation.ngram import NgramProposer, continuation, lookup
from runtime.speculation.suffix import SuffixProposer
from runtime.speculation.suffix_automaton import SuffixAutomaton

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def sequence_of(tokens: list[int], *, prompt: int | None = None, salt: str | None = None) -> Sequence:
    message = make_request("r", tokens[:prompt], cache_salt=salt)
    request = Request(message, (0, 0), 1, 10_000)
    return Sequence(request, 0, array("i", tokens))


def earlier_ends(text: list[int], n: int) -> list[int]:
    """Where the last `n` tokens stood before: the positions after them."""
    return [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]


@given(texts, st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_lookup_finds_the_latest_of_the_longest(text: list[int], smallest: int, more: int) -> None:
    largest = smallest + more
    position, length = lookup(array("i", text), smallest, largest)
    for n in range(min(largest, len(text) - 1), smallest - 1, -1):
        if ends := earlier_ends(text, n):
            assert position == ends[-1]
            assert length >= n
            assert text[position - length : position] == text[len(text) - length :]
            return
    assert length == 0


def test_lookup_is_not_fooled_by_bytes() -> None:
    """0x01000000 0x01000000 holds the bytes of 1 in its middle."""
    big = 1 << 24
    assert lookup(array("i", [big, big, 5, 1]), 1, 1) == (4, 0)


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    tokens = array("i", [9, 1, 2, 3, 1, 2, 3])
    position, _ = lookup(tokens, 2, 5)
    assert continuation(tokens, position, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_ngram_drafts_what_followed() -> None:
    (draft, none) = NgramProposer(2, 4).propose(
        [(sequence_of([5, 6, 7, 8, 9, 5, 6]), 3), (sequence_of([1, 2, 3, 4]), 3)]
    )
    assert draft is not None
    assert draft.token_ids == [7, 8, 9]
    assert none is None


@given(texts)
@settings(max_examples=200, deadline=None)
def test_the_automaton_knows_every_piece(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    pieces = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    # Count paths from the root: each is a different piece.
    seen: set[tuple[int, ...]] = set()
    stack: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while stack:
        state, piece = stack.pop()
        for token_id, target in automaton.follow[state].items():
            seen.add((*piece, token_id))
            stack.append((target, (*piece, token_id)))
    assert seen == pieces
    assert len(automaton) <= 2 * len(text) + 1


@given(texts)
@settings(max_examples=200, deadline=None)
def test_the_automatons_earlier_ending_is_the_longest(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    longest = max((n for n in range(1, len(text)) if earlier_ends(text, n)), default=0)
    assert automaton.earlier()[1] == longest


@given(st.lists(texts, min_size=1, max_size=4), texts)
@settings(max_examples=200, deadline=None)
def test_match_over_several_texts(parts: list[list[int]], query: list[int]) -> None:
    automaton = SuffixAutomaton()
    for part in parts:
        automaton.restart()
        automaton.extend(part)
    known = {tuple(part[i:j]) for part in parts for i in range(len(part)) for j in range(i + 1, len(part) + 1)}
    longest = max((n for n in range(1, len(query) + 1) if tuple(query[len(query) - n :]) in known), default=0)
    assert automaton.match(query)[1] == longest


def test_the_most_frequent_way_on_is_drafted() -> None:
    #  1 2 is followed by 3 twice, by 4 once
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    (draft,) = SuffixProposer(0.3).propose([(sequence_of(text), 1)])
    assert draft is not None
    assert draft.token_ids == [3]
    (careful,) = SuffixProposer(0.9).propose([(sequence_of(text), 1)])
    assert careful is None


def test_past_outputs_help_whoever_may_see_them() -> None:
    proposer = SuffixProposer(0.1, past_tokens=1000)
    proposer.release(sequence_of([1, 5, 6, 7, 8, 9], prompt=1), complete=True)
    (draft,) = proposer.propose([(sequence_of([3, 5, 6, 7], prompt=3), 5)])
    assert draft is not None
    assert draft.token_ids == [8, 9]
    (other,) = proposer.propose([(sequence_of([3, 5, 6, 7], prompt=3, salt="another"), 5)])
    assert other is None


def test_past_outputs_are_bounded() -> None:
    proposer = SuffixProposer(0.1, past_tokens=100)
    for i in range(50):
        proposer.release(sequence_of([0, *range(100 * i, 100 * i + 20)], prompt=1), complete=True)
    past = proposer._pasts[None]
    assert len(past._present) + len(past._before or ()) < 300
    (old,) = proposer.propose([(sequence_of([7, 8, 0, 1, 2], prompt=3), 5)])
    assert old is None
