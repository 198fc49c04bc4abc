"""Streams: their text, stop strings, and what a client that goes away or reads slowly does to the engine."""

from __future__ import annotations

import json
import socket
import time

import parrot
import pytest
from server_harness import ServerThread, wait_until


def completion(server: ServerThread, prompt: str, **fields) -> tuple[str, dict]:
    """A streamed completion: (text, last choice). Fails where a chunk holds half a character."""
    body = {"prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 12} | fields
    text, last = "", {}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])["choices"][0]
                assert "\ufffd" not in last["text"]
                text += last["text"]
    return text, last


@pytest.mark.parametrize("stop", ["DE", ["zzz", "DE"]])
def test_cases_1_and_2_a_stop_string_within_a_token(parrot_server: ServerThread, stop):
    """Cases 1 and 2: the model says the token `DEF`, and `Paris`; the stop string is its beginning."""
    text, last = completion(parrot_server, "The DEF", stop=stop)
    assert text == "The "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DE")
    text, last = completion(parrot_server, "in Paris", stop="Pari")
    assert text == "in "


def test_case_3_a_character_over_two_tokens_is_sent_whole(parrot_server: ServerThread):
    """Case 3: `ď` and an emoji of four bytes are several tokens each; no chunk holds U+FFFD."""
    tokenizer = parrot_server.engine().tokenizer
    length = len(tokenizer.encode("loď 🙃 "))
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokenizer.encode("loď 🙃 "))
    text, _ = completion(parrot_server, "loď 🙃 ", max_tokens=3 * length)
    assert text == "loď 🙃 " * 3


def test_case_4_half_a_character_before_a_space_is_kept(parrot_server: ServerThread):
    """Case 4: bytes that never become a character are shown as U+FFFD at last, not dropped."""
    tokenizer = parrot_server.engine().tokenizer
    half = [next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xc4")]
    space = tokenizer.encode(" is", add_special_tokens=False)
    with parrot_server.client() as client:
        body = {"prompt": [*half, *space], "max_tokens": 4, "temperature": 0}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == "\ufffd is\ufffd is"


def test_case_5_a_tail_held_back_for_a_stop_string_is_sent_whole(parrot_server: ServerThread):
    """Case 5: text that might begin a stop string waits, and arrives in one piece where it does not."""
    text, last = completion(parrot_server, "stop that", stop="stop thanks", max_tokens=None)
    assert text.startswith("stop thatstop that")
    assert last["finish_reason"] == "length"
    client = parrot_server.openai()
    message = {"role": "user", "content": "<think>why</think>because"}
    chunks = client.chat.completions.create(model="parrot", messages=[message], stream=True, stop="</thing>")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.model_extra.get("reasoning_content") or "" for delta in deltas) == "why"
    assert "".join(delta.content or "" for delta in deltas) == "because"


def test_case_6_stop_is_honoured_for_a_prompt_of_token_ids(parrot_server: ServerThread):
    """Case 6: token ids in, and still the stop string ends the text."""
    ids = parrot_server.engine().tokenizer.encode("The DEF")
    text, last = completion(parrot_server, ids, stop="DE")  # type: ignore[arg-type]
    assert (text, last["stop_reason"]) == ("The ", "DE")


@pytest.fixture
def slow_server(artifact):
    """A step takes 20 ms: requests are in flight long enough to be caught."""
    with ServerThread({"parrot": artifact}, factory=parrot.FACTORY, factory_args={"step_s": 0.02}) as running:
        yield running


def raw_request(server: ServerThread, path: str, body: dict) -> socket.socket:
    """Send a request over a bare socket (with a small buffer) and leave the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


LONG = {"max_tokens": 450, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello there"}]} | LONG
ROUTES = [
    ("/v1/completions", {"prompt": "Paris"} | LONG),
    ("/v1/completions", {"prompt": ["Paris", "DEF"], "n": 2} | LONG | {"temperature": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 100}),
    ("/v1/responses", {"input": "x" * 300}),
    ("/generate", {"inputs": "Paris", "parameters": {"max_new_tokens": 450}}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_case_13_a_client_that_goes_away_frees_its_blocks(
    slow_server: ServerThread, path: str, body: dict, stream: bool
):
    """Case 13: closed in mid-request, streaming or not: the blocks are free within a step, nothing more is computed."""
    if path == "/generate" and stream:
        path = "/generate_stream"
    else:
        body = body | {"stream": stream}
    connection = raw_request(slow_server, path, body)
    wait_until(lambda: slow_server.stats().num_running > 0)
    wait_until(lambda: slow_server.state.tracker.output_tokens > 3)
    connection.close()
    wait_until(lambda: not slow_server.state.tracker.active)
    wait_until(lambda: slow_server.stats().num_running == 0, timeout=2)
    after = slow_server.stats()
    assert after.num_free_blocks == after.num_blocks
    assert after.requests_aborted > 0
    assert slow_server.state.admission.in_flight == 0
    time.sleep(0.1)
    assert slow_server.stats().generation_tokens == after.generation_tokens


def test_case_13_a_waiting_request_that_goes_away_never_runs(artifact):
    """Case 13: a client that leaves the queue is never computed."""
    with ServerThread(
        {"parrot": artifact}, factory=parrot.FACTORY, factory_args={"step_s": 0.02}, max_num_seqs=1
    ) as server:
        first = raw_request(server, "/v1/completions", {"prompt": "Paris"} | LONG)
        wait_until(lambda: server.stats().num_running == 1)
        second = raw_request(server, "/v1/completions", {"prompt": "DEF", "stream": True} | LONG)
        wait_until(lambda: server.stats().num_waiting == 1)
        second.close()
        wait_until(lambda: server.stats().num_waiting == 0)
        assert server.stats().num_running == 1
        first.close()
        wait_until(lambda: server.stats().num_running == 0)


def test_a_reader_that_does_not_read_holds_nobody_back(artifact):
    """A client that leaves its stream unread: the engine finishes it, others are served, and it can still read all."""
    with ServerThread({"parrot": artifact}, factory=parrot.FACTORY) as server:
        body = {"prompt": "Paris is ", "stream": True, "logprobs": 20, "n": 16} | LONG | {"temperature": 1}
        lazy = raw_request(server, "/v1/completions", body)
        wait_until(lambda: server.stats().requests_finished == 1)  # more than a socket's buffers hold
        start = time.monotonic()
        text, _ = completion(server, "The DEF", max_tokens=20)
        assert text.startswith("The DEF")
        assert time.monotonic() - start < 5
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            received += lazy.recv(1 << 20)
        assert received.count(b'"finish_reason":"length"') == 16
        lazy.close()


def test_a_silent_stream_is_kept_alive(artifact):
    """A stream with nothing to say for a while sends comment lines, so that proxies do not cut it."""
    from runtime.server.config import ServerConfig

    config = ServerConfig(port=0, keep_alive_interval=0.05)
    slow = ServerThread({"parrot": artifact}, config, factory=parrot.FACTORY, factory_args={"step_s": 0.3})
    with slow as server, server.client() as client:
        raw = client.post("/v1/completions", json={"prompt": "Paris", "max_tokens": 2, "stream": True}).text
    assert raw.count(": keep-alive\n\n") >= 2
    assert raw.endswith("data: [DONE]\n\n")
