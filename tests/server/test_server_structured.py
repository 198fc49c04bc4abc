"""Structured output over HTTP. The model's text is noise, so whatever is valid is so by the grammar."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_harness import ServerThread

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Who?"}]
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {
                "type": "object",
                "properties": {"s": {"$ref": "#/$defs/seconds"}},
                "required": ["s"],
                "additionalProperties": False,
                "$defs": {"seconds": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
]


def check(text: str) -> None:
    """`text` is JSON that the schema allows."""
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"x", "y"}
    assert len(value["tags"]) <= 3


def chat(server: ServerThread, **fields: Any):
    return server.openai().chat.completions.create(model="tiny", messages=MESSAGES, **fields)


def test_json_schema_with_n_and_log_probabilities(server: ServerThread):
    done = chat(server, response_format=JSON_FORMAT, n=4, seed=1, logprobs=True)
    texts = [choice.message.content for choice in done.choices]
    assert len(set(texts)) > 1
    for choice in done.choices:
        check(choice.message.content)
        assert choice.finish_reason == "stop"
        assert len(choice.logprobs.content) > 5


def test_json_schema_streams(server: ServerThread):
    request = {"response_format": JSON_FORMAT, "seed": 2}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(server, **request, stream=True))
    check(text)
    assert text == chat(server, **request).choices[0].message.content


def test_case_20_json_schema_concurrently(server: ServerThread):
    """Case 20: many at once, streamed and not: always valid JSON."""
    many_at_once(server)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_case_20_json_schema_concurrently_with_speculation(artifact: Path, method: str):
    """The same with drafts, cut where the grammar forbids them: those of a draft engine are mostly right here."""
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    if method == "draft_model":
        options["model"] = str(artifact)
    else:
        options["prompt_lookup_min"] = 1
    with ServerThread({"tiny": artifact}, speculative_config=options) as server, server.client() as client:
        many_at_once(server)
        metrics = client.get("/metrics").text
        (accepted,) = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total{.*} ([0-9.e+]+)$", metrics, re.M)
        assert float(accepted) > 0


def many_at_once(server: ServerThread) -> None:
    """32 requests for JSON of a schema, 16 at a time, every other one streamed."""

    def one(seed: int) -> str:
        if seed % 2:
            return chat(server, response_format=JSON_FORMAT, seed=seed).choices[0].message.content
        chunks = chat(server, response_format=JSON_FORMAT, seed=seed, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        for text in pool.map(one, range(32)):
            check(text)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "[ab]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" DIGIT+\nDIGIT: /[0-4]/'}, "max_tokens": 30}, "a[0-4]+"),
        ({"guided_regex": "x{4}"}, "x{4}"),
        ({"guided_choice": ["maybe"]}, "maybe"),
        ({"response_format": {"type": "regex", "value": "[cd]{2}"}}, "[cd]{2}"),
    ],
)
def test_other_constraints_under_each_name(server: ServerThread, fields: dict, pattern: str):
    done = chat(server, extra_body=fields, seed=4)
    assert re.fullmatch(pattern, done.choices[0].message.content)


def test_constraints_on_the_other_routes(server: ServerThread):
    with server.client() as client:
        completion = client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 90, "guided_json": SCHEMA}
        ).json()
        check(completion["choices"][0]["text"])
        grammar = {"type": "json", "value": SCHEMA}
        body = {"inputs": "a", "parameters": {"grammar": grammar, "max_new_tokens": 90, "do_sample": True}}
        check(client.post("/generate", json=body).json()["generated_text"])
        text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
        made = client.post("/v1/responses", json={"input": "a", "text": text}).json()
        check(made["output"][0]["content"][0]["text"])


def test_a_stop_string_ends_structured_output_too(server: ServerThread):
    done = chat(server, response_format=JSON_FORMAT, stop=["age"], seed=1)
    assert done.choices[0].finish_reason == "stop"
    assert "age" not in done.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_required_tools_are_always_called(server: ServerThread, stream: bool):
    made = chat(server, tools=TOOLS, tool_choice="required", seed=3, stream=stream, extra_body={"max_tokens": 400})
    calls: list[list[str]] = []
    for choice in [chunk.choices[0] for chunk in made] if stream else made.choices:
        for call in (choice.delta if stream else choice.message).tool_calls or ():
            if call.id:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments or ""
    assert calls
    # What was cut at the context's end is the last call alone.
    for name, arguments in calls[:-1]:
        (check if name == "find" else json.loads)(arguments)
    assert {name for name, _ in calls} <= {"find", "wait"}


def test_one_call_where_parallel_calls_are_off(server: ServerThread):
    done = chat(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=5)
    assert len(done.choices[0].message.tool_calls) == 1
    assert done.choices[0].finish_reason == "tool_calls"


def test_a_named_tool_is_called_with_its_own_arguments(server: ServerThread):
    named = {"type": "function", "function": {"name": "find"}}
    for seed in range(3):
        done = chat(server, tools=TOOLS, tool_choice=named, seed=seed)
        (call,) = done.choices[0].message.tool_calls
        assert call.function.name == "find"
        check(call.function.arguments)
    chunks = [chunk.choices[0].delta for chunk in chat(server, tools=TOOLS, tool_choice=named, seed=1, stream=True)]
    calls = [call for delta in chunks for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["find"]
    check("".join(call.function.arguments or "" for call in calls))


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(["},
        {"grammar": "start: nowhere"},
        {"grammar": ":::"},
        {"json": {"type": "no-such-type"}},
        {"json": "not json"},
        {"json": {"$ref": "#/$defs/missing"}},
        {"choice": []},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_does_not_compile_is_400(server: ServerThread, constraint: dict, stream: bool):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, extra_body={"structured_outputs": constraint}, stream=stream)
    assert caught.value.param is None or caught.value.param.startswith("structured_outputs")
    assert next(iter(constraint)) in caught.value.message or "structured" in caught.value.message
    assert chat(server, max_tokens=1).choices[0].finish_reason


def test_a_constraint_that_explodes_as_it_runs_ends_alone(artifact):
    """It compiles, and then outgrows llguidance's limits: that request fails, the others and the engine do not."""
    with ServerThread({"tiny": artifact}) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            chat(server, extra_body={"structured_outputs": {"regex": "a{1000000}{1000000}"}})
        assert caught.value.status_code in (400, 500)
        assert chat(server, max_tokens=1).choices[0].finish_reason
