"""`/v1/responses`, driven by the real `openai` client."""

from __future__ import annotations

import openai
import parrot
import pytest
from server_harness import ServerThread, wait_until

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_response_is_made_kept_and_deleted(parrot_server: ServerThread):
    client = parrot_server.openai()
    response = client.responses.create(model="parrot", input="hello there", instructions="Repeat.")
    assert response.output_text == "hello there"
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id).output_text == "hello there"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    kept = client.responses.create(model="parrot", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_a_response_goes_on_from_an_earlier_one(parrot_server: ServerThread):
    client = parrot_server.openai()
    first = client.responses.create(model="parrot", input="one two")
    second = client.responses.create(model="parrot", input="three", previous_response_id=first.id)
    assert second.output_text == "three"
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_events_come_in_openais_order_and_carry_everything(parrot_server: ServerThread):
    client = parrot_server.openai()
    text = f"<think>hm</think>I look.{CALL}"
    events = list(client.responses.create(model="parrot", input=text, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == final.output[2].arguments == '{"city": "Paris"}'
    for added in ("output_item", "content_part"):
        assert kinds.count(f"response.{added}.added") == kinds.count(f"response.{added}.done")


def test_a_function_call_and_its_output_go_back(parrot_server: ServerThread):
    client = parrot_server.openai()
    first = client.responses.create(model="parrot", input=CALL, tools=[TOOL])
    (call,) = first.output
    items = [
        {"role": "user", "content": "weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        {"role": "user", "content": [{"type": "input_text", "text": "sunny, then"}]},
    ]
    assert client.responses.create(model="parrot", input=items, tools=[TOOL]).output_text == "sunny, then"


def test_an_answer_that_is_cut_is_incomplete(parrot_server: ServerThread):
    response = parrot_server.openai().responses.create(model="parrot", input="one two three four", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_background_response_is_fetched_followed_and_cancelled(artifact):
    with ServerThread({"parrot": artifact}, factory=parrot.FACTORY, factory_args={"step_s": 0.02}) as server:
        client = server.openai()
        short = client.responses.create(model="parrot", input="hello", background=True)
        assert short.status in ("queued", "in_progress")
        wait_until(lambda: client.responses.retrieve(short.id).status == "completed")
        assert client.responses.retrieve(short.id).output_text == "hello"
        followed = list(client.responses.retrieve(short.id, stream=True))
        assert followed[-1].type == "response.completed"
        later = list(client.responses.retrieve(short.id, stream=True, starting_after=2))
        assert later[0].sequence_number == 3

        long = client.responses.create(model="parrot", input="x " * 150, background=True)
        wait_until(lambda: server.stats().num_running == 1)
        assert client.responses.cancel(long.id).status == "cancelled"
        wait_until(lambda: server.stats().num_running == 0)
        assert client.responses.retrieve(long.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(client.responses.create(model="parrot", input="x").id)
