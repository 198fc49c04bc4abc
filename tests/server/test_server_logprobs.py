"""Log probabilities over HTTP."""

from __future__ import annotations

import pytest
from server_harness import ServerThread

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "loď 日本"}], "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_case_7_bytes_are_the_tokens_real_bytes(parrot_server: ServerThread, stream: bool):
    """Case 7: the bytes put together are the text's UTF-8; half characters show as bytes, never as an empty string."""
    created = parrot_server.openai().chat.completions.create(**CHAT, logprobs=True, top_logprobs=20, stream=stream)
    choices = [chunk.choices[0] for chunk in created] if stream else [created.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    said = b"".join(bytes(entry.bytes) for entry in entries[:-1])  # the last one ends the turn
    assert said.decode() == "loď 日本"
    for entry in entries:
        assert len(entry.top_logprobs) == 20
        assert entry.top_logprobs[0].token == entry.token
        for top in entry.top_logprobs:
            assert top.token
            try:
                assert bytes(top.bytes).decode() == top.token
            except UnicodeDecodeError:
                assert top.token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in top.bytes)
    assert any(top.token.startswith("bytes:") for entry in entries for top in entry.top_logprobs)


def test_case_8_logprobs_without_top_logprobs(parrot_server: ServerThread):
    """Case 8: 200, with an empty list of alternatives."""
    done = parrot_server.openai().chat.completions.create(**CHAT, logprobs=True)
    entries = done.choices[0].logprobs.content
    assert len(entries) == done.usage.completion_tokens
    assert all(entry.top_logprobs == [] and entry.logprob <= 0 for entry in entries)


def test_streamed_logprobs_equal_the_unstreamed(server: ServerThread):
    request = {"model": "tiny", "prompt": "Paris is", "max_tokens": 12, "seed": 5, "logprobs": 3}
    whole = server.openai().completions.create(**request).choices[0].logprobs
    tokens, values = [], []
    for chunk in server.openai().completions.create(**request, stream=True):
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.tokens
        values += logprobs.token_logprobs
    assert (tokens, values) == (whole.tokens, whole.token_logprobs)


def test_a_forbidden_token_has_a_finite_log_probability(server: ServerThread):
    """JSON has no infinity."""
    request = {"model": "tiny", "prompt": "Paris", "max_tokens": 3, "logprobs": 5}
    raw = server.openai().completions.with_raw_response.create(**request, extra_body={"allowed_token_ids": [70, 71]})
    assert "Infinity" not in raw.text
    assert all(value >= -9999 for value in raw.parse().choices[0].logprobs.token_logprobs)
