"""Stop strings: wherever they lie, however the text came in; cases 1, 2 and 5."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.stop_strings import StopStringFilter, StopStringMatcher


def first_match(text: str, strings: list[str]) -> tuple[str, int] | None:
    """By definition: the stop string whose end comes first, the longest of those that end there."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in strings if s in text]
    if not ends:
        return None
    end, _, string = min(ends)
    return string, end - len(string)


def run(pieces: list[str], strings: list[str], **options) -> tuple[list[str], StopStringFilter]:
    stops = StopStringFilter(strings, **options)
    sent = []
    for piece in pieces:
        sent.append(stops.feed(piece))
        if stops.match:
            return sent, stops
    sent.append(stops.flush())
    return sent, stops


pieces_strategy = st.lists(st.text("abc", max_size=4), max_size=12)
strings_strategy = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=1000, deadline=None)
@given(pieces_strategy, strings_strategy, st.booleans())
def test_any_text_in_any_pieces(pieces, strings, include):
    text = "".join(pieces)
    expected = first_match(text, strings)
    sent, stops = run(pieces, strings, include_in_output=include)
    if expected is None:
        assert stops.match is None
        assert "".join(sent) == text
    else:
        string, start = expected
        assert (stops.match.string, stops.match.start) == expected
        assert "".join(sent) == text[: start + len(string) if include else start]


@settings(max_examples=500, deadline=None)
@given(pieces_strategy, strings_strategy)
def test_what_is_sent_never_begins_a_stop_string_and_no_more_is_held_than_needed(pieces, strings):
    stops = StopStringFilter(strings)
    fed, sent = [], ""
    for piece in pieces:
        sent += stops.feed(piece)
        if stops.match:
            break
        fed.append(piece)
        text = "".join(fed)
        held = max((k for s in strings for k in range(len(s)) if text.endswith(s[:k])), default=0)
        # Whole pieces only: up to the piece in which the possible beginning lies.
        lengths = [0]
        for part in fed:
            lengths.append(lengths[-1] + len(part))
        assert len(sent) == max(n for n in lengths if n <= len(text) - held)


@settings(max_examples=500, deadline=None)
@given(pieces_strategy, strings_strategy, st.integers(0, 6))
def test_min_tokens(pieces, strings, min_tokens):
    """A stop string that the first `min_tokens` tokens complete does not count."""
    text, early = "".join(pieces), len("".join(pieces[:min_tokens]))
    ends = [
        (i + len(s), -len(s), s)
        for s in strings
        for i in range(len(text))
        if text.startswith(s, i) and i + len(s) > early
    ]
    sent, stops = run(pieces, strings, min_tokens=min_tokens)
    if not ends:
        assert stops.match is None
        assert "".join(sent) == text
    else:
        end, _, string = min(ends)
        assert (stops.match.string, stops.match.end) == (string, end)
        assert "".join(sent) == text[: end - len(string)]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["x", "DEF", "y"], "DE", "x"),  # case 1
        (["In ", "Paris", "."], "Pari", "In "),  # case 2
        (["a<", "/s", ">b"], "</s>", "a"),
        (["a\n", "\n", "b"], "\n\n", "a"),
        (["aab", "aac"], "aabaac", ""),
        (["ab", "ab", "abc"], "ababc", "ab"),
    ],
)
def test_over_token_edges(pieces, stop, expected):
    sent, stops = run(pieces, [stop])
    assert "".join(sent) == expected
    assert stops.match.string == stop


def test_case_5_a_held_tail_that_was_none_is_sent_whole():
    sent, stops = run(["</", "think", ">", "!"], ["</s>"])
    assert sent == ["", "</think", ">", "!", ""]
    assert stops.match is None


def test_case_5_a_marker_is_sent_in_one_piece():
    """Its last character may begin a stop string: the marker waits whole, and is not sent without that character."""
    sent, _ = run(["so", "</think>", "\n", "yes"], [">\n\n"])
    assert sent == ["so", "", "", "</think>\nyes", ""]


def test_longest_of_those_that_end_together():
    _, stops = run(["xabc"], ["bc", "abc", "c"])
    assert (stops.match.string, stops.match.start) == ("abc", 1)


def test_without_stop_strings_text_passes_through():
    assert run(["a", "", "b"], [])[0] == ["a", "", "b", ""]


def test_many_and_long_stop_strings_take_linear_time():
    strings = ["a" * n + "b" for n in range(1, 60)]
    matcher = StopStringMatcher(strings)
    assert matcher.feed("a" * 20_000) is None
    assert matcher.held == 59
    assert matcher.feed("b").string == "a" * 59 + "b"
