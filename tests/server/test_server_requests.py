"""What a server does with requests that ask for too much, or for what there is not: 4xx that names the field."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time

import pytest
from server_harness import ServerThread
from tiny_served import write_served_artifact


def refused(server: ServerThread, path: str, body: object, status: int = 400) -> dict:
    """The error object of a request that must be refused."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    with server.client() as client:
        response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    return response.json()["error"]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_case_16_prompt_and_max_tokens_over_the_context(server: ServerThread):
    """Case 16: 400 with both numbers and the limit; absent: to the end of the context; huge: 400, the server lives."""
    error = refused(server, "/v1/completions", {"prompt": "Paris is", "max_tokens": 510})
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("3 tokens", "510", "513", "512"))
    assert refused(server, "/v1/completions", {"prompt": "Paris is", "max_tokens": 10**18})["param"] == "max_tokens"
    assert refused(server, "/v1/chat/completions", CHAT | {"max_completion_tokens": 510})["param"] == (
        "max_completion_tokens"
    )
    assert refused(server, "/v1/completions", {"prompt": [7] * 512, "max_tokens": 1})["code"] == (
        "context_length_exceeded"
    )
    with server.client() as client:
        body = {"prompt": "Paris is", "max_tokens": None, "ignore_eos": True, "temperature": 0}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["total_tokens"] == 512
        chat = client.post("/v1/chat/completions", json=CHAT | {"ignore_eos": True}).json()
        assert chat["usage"]["total_tokens"] == 512


def test_case_17_a_schema_at_the_wrong_level(server: ServerThread):
    """Case 17: `schema` beside `type` instead of within `json_schema` is refused, not ignored."""
    body = CHAT | {"response_format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert refused(server, "/v1/chat/completions", body)["param"] == "response_format.json_schema"
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert refused(server, "/v1/chat/completions", body)["param"] == "response_format.json_schema.schema"


def test_case_18_exactly_one_bos(tmp_path):
    """Case 18: a prompt that already holds BOS, templated or written by hand, gets no second one."""
    artifact = write_served_artifact(tmp_path / "llama", "byte_fallback")
    with ServerThread({"llama": artifact}) as server, server.client() as client:
        bos = server.engine().tokenizer.bos_token_id
        text = server.engine().tokenizer.special_tokens["bos_token"]
        for prompt in ("Paris", f"{text}Paris"):
            tokens = client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
            assert tokens.count(bos) == 1
            body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            assert choice["prompt_token_ids"].count(bos) == 1
            stream = client.post("/v1/completions", json=body | {"stream": True}).text
            first = json.loads(stream.split("\n")[0].removeprefix("data: "))
            assert first["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


BOS_TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}",
    "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}",
]


@pytest.mark.parametrize("template", BOS_TEMPLATES)
def test_case_18_a_chat_template_writes_bos_or_does_not(tmp_path, template: str):
    """Case 18 through chats: the template alone says whether there is a BOS; the tokenizer adds none of its own."""
    artifact = write_served_artifact(tmp_path / "llama", "byte_fallback", chat_template=template)
    written = int("bos_token" in template)
    messages = [{"role": "user", "content": "Paris"}]
    chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    with ServerThread({"llama": artifact}) as server, server.client() as client:
        bos = server.engine().tokenizer.bos_token_id
        # The second time the prompt is in the prefix cache.
        ids, again = (client.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"] for _ in range(2))
        assert ids == again
        assert ids.count(bos) == written
        assert ids[0] == bos or not written
        assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == ids
        stream = client.post("/v1/chat/completions", json=chat | {"stream": True}).text
        first = json.loads(stream.split("\n")[0].removeprefix("data: "))
        assert first["prompt_token_ids"] == ids
        # The counts of the routes that do not show their ids.
        anthropic = {"model": "llama", "messages": messages, "max_tokens": 1}
        count = client.post("/v1/messages/count_tokens", json=anthropic).json()["input_tokens"]
        responses = client.post("/v1/responses", json={"model": "llama", "input": messages, "max_output_tokens": 1})
        assert count == responses.json()["usage"]["input_tokens"] == len(ids)


def test_case_19_tokenize_without_messages(server: ServerThread):
    """Case 19: an empty chat is refused with a useful message, and so is a body that holds nothing."""
    error = refused(server, "/tokenize", {"messages": []})
    assert error["param"] == "messages"
    assert "1" in error["message"]
    assert "exactly one" in refused(server, "/tokenize", {})["message"]
    assert "exactly one" in refused(server, "/tokenize", {"prompt": "a", "inputs": "b"})["message"]


BAD = [
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt[0]"),
    ("/v1/completions", {"prompt": [1, 99999]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt[0]"),
    ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "8"}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -0.5}, "temperature"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_k": -2}, "top_k"),
    ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 33}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 4, "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": "a", "best_of": 33}, "best_of"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": "x" * 513}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": ""}, "stop"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream"),
    ("/v1/completions", {"prompt": "a", "seed": 2**70}, "seed"),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ("/v1/completions", {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "logprobs"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/score", {"text_1": "a", "text_2": [""]}, "text_2[0]"),
    ("/v1/responses", {"input": [{"type": "image"}]}, "input[0].type"),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_0"}, "previous_response_id"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_values_are_refused_by_name(server: ServerThread, path: str, body: dict, param: str):
    error = refused(server, path, body, 404 if "previous_response_id" in body else 400)
    assert error["param"] == param, error
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nul", b'{"prompt": NaN}', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000]
)
def test_what_is_no_json_is_refused(server: ServerThread, body: bytes):
    assert refused(server, "/v1/completions", body)["type"] == "invalid_request_error"


def test_an_unknown_model_is_404_and_the_answer_names_those_that_exist(server: ServerThread):
    error = refused(server, "/v1/completions", {"model": "gpt-5", "prompt": "a"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


def test_a_body_that_is_not_declared_json_is_415(server: ServerThread):
    with server.client() as client:
        response = client.post("/v1/completions", content='{"prompt": "a"}', headers={"content-type": "text/plain"})
        assert response.status_code == 415
        assert "application/json" in response.json()["error"]["message"]
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        packed = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
        assert packed.status_code == 415
        assert "gzip" in packed.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_declared_or_not(artifact):
    from runtime.server.config import RequestLimits, ServerConfig

    config = ServerConfig(port=0, limits=RequestLimits(max_body_bytes=2000))
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        large = json.dumps({"prompt": "a" * 3000}).encode()
        declared = client.post("/v1/completions", content=large, headers={"content-type": "application/json"})
        chunked = client.post(
            "/v1/completions", content=iter([large[:1500], large[1500:]]), headers={"content-type": "application/json"}
        )
        assert (declared.status_code, chunked.status_code) == (413, 413)
        assert "2000" in declared.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_unknown_fields_are_ignored_as_vllm_ignores_them(server: ServerThread):
    with server.client() as client:
        body = {"prompt": "a", "max_tokens": 1, "future_option": {"x": 1}}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_embeddings_of_a_model_that_generates_are_refused_with_the_reason(server: ServerThread):
    for path in ("/v1/embeddings", "/pooling"):
        error = refused(server, path, {"input": "Paris", "model": "tiny"})
        assert (error["code"], error["param"]) == ("no_embedding_output", "model")
        assert refused(server, path, {"input": "Paris", "model": "other"}, 404)["code"] == "model_not_found"


def _answer(server: ServerThread, *pieces: bytes, pause: float = 0.0) -> bytes:
    """All that the server says to `pieces`, sent one after another, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                connection.sendall(piece)
            time.sleep(pause)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while received := connection.recv(65536):
                answer += received
        return answer


def test_a_head_without_end_is_431(server: ServerThread):
    start = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "
    assert _answer(server, start, *[b"a" * 8192] * 20).startswith(b"HTTP/1.1 431")
    many = b"GET /health HTTP/1.1\r\nhost: x\r\n", *[b"x-%d: a\r\n" % number * 500 for number in range(40)]
    assert _answer(server, *many).startswith(b"HTTP/1.1 431")


def test_a_head_or_a_body_that_stops_coming_is_408(artifact, monkeypatch):
    monkeypatch.setattr("runtime.server.http.HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr("runtime.server.body._PAUSE_S", 0.5)
    with ServerThread({"tiny": artifact}) as server:
        assert _answer(server, b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")
        assert _answer(server).startswith(b"HTTP/1.1 408")  # nothing at all
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
        answer = _answer(server, head + b"connection: close\r\n\r\n", b'{"prompt"')
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"9 bytes received" in answer
        # A long answer, and a connection that rests between requests, are not held up.
        with server.client() as client:
            body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
            for _ in range(2):
                assert '"finish_reason":"length"' in client.post("/v1/completions", json=body).text
                time.sleep(0.7)
