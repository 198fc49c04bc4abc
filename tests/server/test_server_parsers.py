"""Parsers: any split of a text gives the same result as the whole, and what is no call comes back as content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS, Chain, JsonListParser, NamedToolParser, pick
from runtime.server.parsers.base import Content, Reasoning, TextParser, ToolArguments, ToolStart
from runtime.server.parsers.reasoning import ThinkParser
from runtime.server.parsers.tools import HermesParser, Llama3Parser, MistralParser

WEATHER = {"city": 'Zürich "centre" }]', "days": [1, {"a": "\\"}]}
CALL = json.dumps({"name": "get_weather", "arguments": WEATHER})
LLAMA = json.dumps({"name": "get_weather", "parameters": WEATHER})


def run(parser: TextParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(tool name, arguments)])."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    calls: list[tuple[str, str]] = []
    reasoning = content = ""
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolStart(_, name):
                calls.append((name, ""))
            case ToolArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return reasoning, content, calls


def hermes() -> TextParser:
    return HermesParser(["get_weather"])


def llama() -> TextParser:
    return Llama3Parser(["get_weather"])


def mistral() -> TextParser:
    return MistralParser(["get_weather"])


ONE = [("get_weather", WEATHER)]
CASES = [
    (hermes, f"<tool_call>\n{CALL}\n</tool_call>", "", ONE),
    (hermes, f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "I look.\n", ONE * 2),
    (hermes, f"<tool_call>{CALL}", "", ONE),
    (hermes, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", {"x": 1})]),
    (hermes, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
    (hermes, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (hermes, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (hermes, "a < b <tool", "a < b <tool", []),
    (hermes, "", "", []),
    (llama, LLAMA, "", ONE),
    (llama, f"<|python_tag|>{LLAMA}; {LLAMA}", "", ONE * 2),
    (llama, '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    (llama, 'The {"name": "get_weather"}', 'The {"name": "get_weather"}', []),
    (llama, "<|python", "<|python", []),
    (mistral, f"[TOOL_CALLS][{CALL}, {CALL}]", "", ONE * 2),
    (mistral, f"[TOOL_CALLS] [{CALL}]", "", ONE),
    (mistral, f"Yes.[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER)}", "Yes.", ONE),
    (
        mistral,
        f"[TOOL_CALLS]get_weather{json.dumps(WEATHER)}[TOOL_CALLS]get_weather{{}}",
        "",
        [*ONE, ("get_weather", {})],
    ),
    (mistral, "[TOOL", "[TOOL", []),
    (JsonListParser, f"[{LLAMA},\n {LLAMA}]", "", ONE * 2),
    (lambda: NamedToolParser("get_weather"), json.dumps(WEATHER), "", ONE),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_every_split_of_a_text_gives_the_same_calls(make, text, content, calls):
    splits = [[text], list(text), [text[:7], text[7:]], [text[i : i + 5] for i in range(0, len(text), 5)]]
    for pieces in splits:
        _, said, called = run(make(), pieces)
        assert said == content
        assert [(name, json.loads(arguments)) for name, arguments in called] == calls


def test_arguments_stream_before_the_call_is_complete():
    parser = hermes()
    events = parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Par')
    assert [type(event) for event in events] == [ToolStart, ToolArguments]
    assert parser.feed("is")[0] == ToolArguments("is")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nYes", "hm\n", "Yes"),
        ("assistant\n<think>\n", "hm</think>Yes", "hm", "Yes"),
        ("", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("", "<think>cut off", "cut off", ""),
        ("", "<thin", "", "<thin"),
        ("", "<think>a</thi", "a</thi", ""),
        ("", "  \n", "", "  \n"),
    ],
)
def test_reasoning_is_split_from_the_answer(prompt, text, reasoning, content):
    for pieces in ([text], list(text)):
        assert run(ThinkParser(prompt), pieces)[:2] == (reasoning, content)


def test_case_5_a_marker_split_over_deltas_is_found_whole():
    """Case 5: a tail held back for a stop string arrives late and in pieces; the marker in it is still seen."""
    assert run(ThinkParser(""), ["<think>hm</", "think>", "ok"])[:2] == ("hm", "ok")
    assert run(ThinkParser(""), ["<think>a</th", "ought>b</think>c"])[:2] == ("a</thought>b", "c")


def test_a_call_after_reasoning_is_found_and_one_within_it_is_not():
    text = f"<think>maybe <tool_call>{CALL}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    reasoning, content, calls = run(Chain(ThinkParser(""), hermes()), list(text))
    assert "<tool_call>" in reasoning
    assert (content, [name for name, _ in calls]) == ("", ["get_weather"])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "[", "]", ";"),
    *(
        '{"name": "get_weather", "arguments": ',
        '{"a": "\\"}"}',
        "}",
        '{"arguments": 1, "name": "f"}',
        "f{",
        "text",
        " ",
    ),
]


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet='<>{}[]",:\\ab tool_callTOOL_CALLSARGSpython|think/', max_size=80)
    | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    st.data(),
)
def test_no_text_breaks_a_parser_and_splits_agree(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for make in (hermes, llama, mistral, lambda: ThinkParser(""), JsonListParser):
        assert run(make(), pieces) == run(make(), [text])


def test_the_template_picks_the_parser():
    assert pick(TOOL_PARSERS, "auto", "... <tool_call> ...") is HermesParser
    assert pick(TOOL_PARSERS, "auto", "[TOOL_CALLS]") is MistralParser
    assert pick(TOOL_PARSERS, "auto", "{{ message }}") is None
    assert pick(TOOL_PARSERS, "none", "<tool_call>") is None
    assert pick(REASONING_PARSERS, "think", "") is ThinkParser
