"""Whatever comes in, the server answers as it says it does: schemathesis over its own OpenAPI, and mutated bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_harness import ServerThread
from tiny_served import write_served_artifact

from runtime.async_llm import AsyncLLM
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.registry import ModelRegistry

CHECKS = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[ServerThread]:
    """A context of 48 tokens: whatever length a body asks for, its answer is short."""
    artifact = write_served_artifact(tmp_path_factory.mktemp("small") / "tiny", max_context_len=48)
    with ServerThread({"tiny": artifact}, ServerConfig(port=0, admin_keys=("admin",))) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Iterator[ServerThread]:
    artifact = write_served_artifact(tmp_path_factory.mktemp("small") / "e", max_context_len=48, pooling="last")
    with ServerThread({"tiny": artifact}, factory="tiny_served:open_embedder") as running:
        yield running


def operations() -> list[schemathesis.APIOperation]:
    """Every operation of the server's own description, but the one whose stream has no end."""

    async def load(path: Path) -> AsyncLLM:
        raise AssertionError("nothing is loaded to describe the routes")

    described = create_app(ServerConfig(), ModelRegistry(load)).openapi()
    every = schemathesis.openapi.from_dict(described).exclude(path="/live").get_all_operations()
    return [operation.ok() for operation in every]


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
def test_the_server_answers_as_its_openapi_says(small: ServerThread, operation: schemathesis.APIOperation):
    """For what fits the description and what does not: no 500, and only statuses, types and bodies that it has."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]

    @hypothesis.settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(modes))
        try:
            case = data.draw(operation.as_strategy(generation_mode=mode))
        except hypothesis.errors.Unsatisfiable:  # nothing to get wrong
            hypothesis.reject()
        case.call_and_validate(base_url=small.url, checks=CHECKS, headers=ADMIN, timeout=30)

    check()


VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny",
        "prompt": ["a", "b"],
        "max_tokens": 3,
        "n": 2,
        "stop": ["x"],
        "logprobs": 2,
        "logit_bias": {"5": 1.5},
        "seed": 1,
        "stream_options": {"include_usage": True},
        "top_k": 3,
        "structured_outputs": {"regex": "[ab]+"},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"x": 1},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "max_output_tokens": 3,
        "text": {"format": {"type": "json_object"}},
        "metadata": {"a": "b"},
    },
    "/generate": {
        "inputs": "hi",
        "parameters": {
            "max_new_tokens": 3,
            "do_sample": True,
            "stop": ["x"],
            "top_n_tokens": 2,
            "details": True,
            "grammar": {"type": "regex", "value": "[ab]+"},
        },
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
}

NOT_STREAMED = {"/tokenize", "/detokenize", "/score", "/generate", "/v1/embeddings", "/pooling"}
EMBEDDING = {
    "model": "tiny",
    "input": ["a", "b"],
    "encoding_format": "float",
    "dimensions": 5,
    "normalize": True,
    "truncate_prompt_tokens": 4,
    "user": "u",
    "priority": 1,
    "cache_salt": "s",
}
VALID_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": EMBEDDING,
    "/pooling": EMBEDDING | {"input": [[1, 2], [3]], "task": "embed", "encoding_format": "base64"},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
}

SAMPLE = 80  # of every place by every odd value, the same ones each time
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "0", "\ud7ff\ue000", "a" * 5000,
    [], [[]], [None], [0] * 60, {}, {"type": "x"}, {"a": {}}, [{"role": "x"}], "null",
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(value: Any, path: tuple, how: Any) -> Any:
    """A copy with the place replaced (or, for the ellipsis, removed)."""
    if not path:
        return {} if how is ... else how
    copy = value.copy()
    key, rest = path[0], path[1:]
    if not rest and how is ...:
        del copy[key]
    else:
        copy[key] = mutated(value[key], rest, how)
    return copy


@pytest.mark.parametrize("path", VALID)
def test_every_field_survives_every_odd_value(small: ServerThread, path: str):
    """A valid body with one place replaced or removed: 200, or 4xx whose message is no riddle; never 5xx."""
    survives(small, path, VALID[path])


@pytest.mark.parametrize("path", VALID_EMBEDDINGS)
def test_every_field_of_an_embedding_survives_too(embedder: ServerThread, path: str):
    survives(embedder, path, VALID_EMBEDDINGS[path])


def survives(server: ServerThread, path: str, valid: dict[str, Any]) -> None:
    rng = random.Random(path)
    cases = [(place, how) for place in places(valid) for how in (*ODD, ...)]
    with server.client() as client:
        assert client.post(path, json=valid).status_code == 200
        for place, how in rng.sample(cases, min(len(cases), SAMPLE)):
            body = mutated(valid, place, how)
            for stream in (False, True):
                if isinstance(body, dict) and path not in NOT_STREAMED:
                    body = body | {"stream": stream}
                response = client.post(path, json=body)
                assert response.status_code < 500, (body, response.text)
                if response.status_code >= 400:
                    error = response.json()["error"]
                    assert len(error if isinstance(error, str) else error["message"]) > 10
                if how is not None and how is not ... and place and response.status_code == 400:
                    # The message names the field, or the one that it contradicts.
                    message = json.dumps(response.json())
                    assert any(str(key) in message for key in place) or "`" in message or "structured" in message, (
                        message
                    )


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_no_bytes_break_a_route(small: ServerThread, body: bytes):
    with small.client() as client:
        for path in ("/v1/completions", "/generate", "/v1/messages"):
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= response.status_code < 500


def test_the_openapi_names_every_route_and_field(small: ServerThread):
    with small.client() as client:
        described = client.get("/openapi.json").json()
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/tokenize",
    } <= set(described["paths"])
    fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "min_p", "stop_token_ids", "structured_outputs", "cache_salt"} <= set(fields)
