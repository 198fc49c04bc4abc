"""TGI's routes, by hand and by `huggingface_hub.InferenceClient`."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from server_harness import ServerThread


@pytest.fixture
def client(server: ServerThread) -> huggingface_hub.InferenceClient:
    return huggingface_hub.InferenceClient(base_url=server.url)


def test_generate_has_details_under_tgis_names(client: huggingface_hub.InferenceClient, server: ServerThread):
    output = client.text_generation(
        "Paris is", max_new_tokens=5, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert output.details.finish_reason == "length"
    assert output.details.generated_tokens == len(output.details.tokens) == 5
    assert [token.id for token in output.details.prefill] == server.engine().tokenizer.encode("Paris is")
    assert output.details.prefill[0].logprob is None
    assert all(len(top) == 2 for top in output.details.top_tokens)
    assert "".join(token.text for token in output.details.tokens if not token.special).startswith(
        output.generated_text[:1]
    )


def test_a_stream_has_one_event_a_token_and_the_text_at_the_end(client: huggingface_hub.InferenceClient):
    whole = client.text_generation("Paris is", max_new_tokens=8, seed=3, temperature=0.9)
    events = list(
        client.text_generation("Paris is", max_new_tokens=8, seed=3, temperature=0.9, stream=True, details=True)
    )
    assert [event.index for event in events] == list(range(1, 9))
    assert events[-1].generated_text == whole == "".join(event.token.text for event in events)
    assert events[-1].details.generated_tokens == 8
    assert events[-1].details.seed == 3
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    assert "".join(client.text_generation("Paris is", max_new_tokens=8, seed=3, temperature=0.9, stream=True)) == whole


def test_parameters_without_do_sample_are_greedy(client: huggingface_hub.InferenceClient):
    assert client.text_generation("Paris", max_new_tokens=6) == client.text_generation("Paris", max_new_tokens=6)
    sampled = client.text_generation("Paris", max_new_tokens=3, do_sample=True, details=True, seed=11)
    assert sampled.details.seed == 11


def test_full_text_stop_and_best_of(client: huggingface_hub.InferenceClient, parrot_server: ServerThread):
    parrot = huggingface_hub.InferenceClient(base_url=parrot_server.url)
    assert parrot.text_generation("The DEF", max_new_tokens=9, stop=["DE"], return_full_text=True) == "The DEFThe "
    stopped = parrot.text_generation("The DEF", max_new_tokens=9, stop=["DE"], details=True)
    assert stopped.details.finish_reason == "stop_sequence"
    best = client.text_generation("Paris", max_new_tokens=4, do_sample=True, best_of=3, details=True)
    assert len(best.details.best_of_sequences) == 2


def test_the_chat_and_the_other_routes_of_a_tgi_client(parrot_server: ServerThread):
    client = huggingface_hub.InferenceClient(base_url=parrot_server.url)
    done = client.chat_completion([{"role": "user", "content": "hello there"}], max_tokens=20)
    assert done.choices[0].message.content == "hello there"
    pieces = client.chat_completion([{"role": "user", "content": "hello there"}], max_tokens=20, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "hello there"


def test_info_and_tokenize(server: ServerThread):
    with server.client() as client:
        info = client.get("/info").json()
        assert info["model_id"] == "tiny"
        assert (info["max_total_tokens"], info["max_input_tokens"]) == (512, 511)
        text = "Paris is the capital"
        tokens = client.post("/tokenize", json={"inputs": text}).json()
    assert [text[token["start"] : token["stop"]] for token in tokens] == [token["text"] for token in tokens]


def test_the_root_is_tgis_compat_route_and_headers_tell_the_times(server: ServerThread):
    with server.client() as client:
        whole = client.post("/", json={"inputs": "Paris", "parameters": {"max_new_tokens": 3}})
        (answer,) = whole.json()
        assert answer["generated_text"]
        assert whole.headers["x-generated-tokens"] == "3"
        assert int(whole.headers["x-total-time"]) >= int(whole.headers["x-inference-time"])
        stream = client.post("/", json={"inputs": "Paris", "parameters": {"max_new_tokens": 3}, "stream": True})
        events = [json.loads(line[5:]) for line in stream.text.splitlines() if line.startswith("data:")]
        assert events[-1]["generated_text"] == answer["generated_text"]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 600}, "max_new_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"watermark": True}, "watermark"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"adapter_id": "x"}, "adapter_id"),
        ({"grammar": {"type": "bnf", "value": "x"}}, "grammar"),
    ],
)
def test_bad_parameters_are_422_with_tgis_error_object(server: ServerThread, parameters: dict, name: str):
    with server.client() as client:
        response = client.post("/generate", json={"inputs": "Paris", "parameters": parameters})
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "validation"
    assert name in response.json()["error"]


def test_a_stream_refuses_what_it_cannot_show(server: ServerThread):
    with server.client() as client:
        for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
            response = client.post("/generate_stream", json={"inputs": "Paris", "parameters": parameters})
            assert response.status_code == 422
        assert client.post("/generate", json={"inputs": ""}).status_code == 422
        assert client.post("/generate", json={}).json()["error_type"] == "validation"
