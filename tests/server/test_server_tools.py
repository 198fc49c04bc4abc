"""Tools and reasoning over HTTP: the parrot says the very text that a model would."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_harness import ServerThread

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def chat(server: ServerThread, text: str, **fields: Any):
    return server.openai().chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": text}], temperature=0, **fields
    )


def streamed(chunks) -> tuple[str, list[list[str]], str | None]:
    """(content, [[id, name, arguments]], finish reason)."""
    content, calls, finish = "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments or ""
    return content, calls, finish


def test_a_call_is_parsed_and_ends_with_its_own_reason(parrot_server: ServerThread):
    choice = chat(parrot_server, f"I look.{CALL}", tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_calls_stream_as_argument_deltas(parrot_server: ServerThread):
    """Tokens that wait for a slow reader leave in one delta: only a long call is sure to come in several."""
    city = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch"
    call = CALL.replace("Paris", city)
    chunks = list(chat(parrot_server, f"{call}\n{call}", tools=[WEATHER], stream=True))
    content, calls, finish = streamed(chunks)
    assert (content, finish) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("get_weather", {"city": city})] * 2
    assert calls[0][0] != calls[1][0]
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.function.arguments]
    assert len(pieces) > len(calls)


def test_without_tools_or_with_choice_none_the_text_stays_text(parrot_server: ServerThread):
    assert chat(parrot_server, CALL).choices[0].message.content == CALL
    choice = chat(parrot_server, CALL, tools=[WEATHER], tool_choice="none").choices[0]
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_reasoning_is_apart_from_the_answer(parrot_server: ServerThread):
    text = f"<think>\nhm\n</think>\n\n{CALL}"
    message = chat(parrot_server, text, tools=[WEATHER]).choices[0].message
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "hm\n"
    assert message.tool_calls[0].function.name == "get_weather"
    hidden = chat(parrot_server, text, extra_body={"include_reasoning": False}).choices[0].message
    assert "reasoning_content" not in hidden.model_extra
    chunks = list(chat(parrot_server, text, stream=True))
    thought = "".join(chunk.choices[0].delta.model_extra.get("reasoning_content") or "" for chunk in chunks)
    assert thought == "hm\n"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CALL


def test_a_call_and_its_result_go_back_into_the_prompt(parrot_server: ServerThread):
    """The whole loop: the answer's own message is accepted as history, arguments and all."""
    call = chat(parrot_server, CALL, tools=[WEATHER]).choices[0].message
    messages = [
        {"role": "user", "content": "weather?"},
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"},
        {"role": "user", "content": "sunny, then"},
    ]
    done = parrot_server.openai().chat.completions.create(model="parrot", messages=messages, tools=[WEATHER])
    assert done.choices[0].message.content == "sunny, then"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_impossible_tools_are_refused_by_name(parrot_server: ServerThread, fields: dict, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(parrot_server, "x", **({"tools": [WEATHER]} | fields))
    assert caught.value.param == param


def test_arguments_in_the_history_that_are_no_json_are_refused(parrot_server: ServerThread):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
        parrot_server.openai().chat.completions.create(model="parrot", messages=messages)
