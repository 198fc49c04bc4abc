"""Anthropic's Messages API, driven by the real `anthropic` client."""

from __future__ import annotations

import anthropic
import pytest
from server_harness import ServerThread

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def client(parrot_server: ServerThread) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=parrot_server.url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, text: str, **fields):
    fields = {"max_tokens": 200} | fields
    return client.messages.create(model="parrot", messages=[{"role": "user", "content": text}], **fields)


def test_a_message_has_blocks_reason_and_usage(client: anthropic.Anthropic):
    message = ask(client, "loď and back", system="Repeat.")
    assert [block.text for block in message.content] == ["loď and back"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 2
    assert message.id.startswith("msg_")
    assert ask(client, "loď and back", max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, "The DEF", stop_sequences=["DE"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("The ", "stop_sequence", "DE")


def test_a_stream_makes_the_same_message(client: anthropic.Anthropic):
    text = f"<think>hm</think>I look.{CALL}"
    request = {
        "model": "parrot",
        "max_tokens": 200,
        "tools": [TOOL],
        "messages": [{"role": "user", "content": text}],
    }
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    whole = client.messages.create(**request)
    assert message.stop_reason == whole.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == whole.content[0].thinking == "hm"
    assert message.content[1].text == whole.content[1].text == "I look."
    assert message.content[2].input == whole.content[2].input == {"city": "Paris"}
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_tool_results_go_back_into_the_prompt(client: anthropic.Anthropic):
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "sunny, then"}]},
    ]
    done = client.messages.create(model="parrot", max_tokens=50, messages=messages, tools=[TOOL])
    assert done.content[0].text == "sunny, then"
    counted = client.messages.count_tokens(model="parrot", messages=messages, tools=[TOOL])
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens


def test_errors_have_anthropics_shape(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    assert missing.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        client.messages.create(model="parrot", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(client, "x", max_tokens=5000)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        ask(client, "x", tools=[{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}])
