"""`/v1/embeddings` and `/pooling`, by the real clients, against the same model read alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from server_harness import ServerThread
from tiny_model import TinyEmbedder
from tiny_served import write_served_artifact

from runtime.server.config import RequestLimits, ServerConfig

SIZE, CONTEXT = 32, 64
TEXTS = ["The capital of France is Paris.", "Water boils at 100 degrees.", "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    artifact = write_served_artifact(
        tmp_path_factory.mktemp("embedder") / "a", max_context_len=CONTEXT, max_num_batched_tokens=32, pooling="mean"
    )
    config = ServerConfig(port=0, limits=RequestLimits(max_inputs=100))
    with ServerThread({"embedder": artifact}, config, factory="tiny_served:open_embedder") as running:
        yield running


def expected(server: ServerThread, ids: list[int], dimensions: int = SIZE) -> NDArray[np.float64]:
    """The vector of a prompt: the mean of its hidden states, computed alone, cut, and to length 1."""
    vocab_size = server.engine().manifest.model.vocab_size
    hidden = TinyEmbedder(vocab_size=vocab_size, num_blocks=CONTEXT).read_alone(ids)
    vector = hidden.astype(np.float64).mean(0)[:dimensions]
    return vector / np.linalg.norm(vector)


def ids_of(server: ServerThread, text: str) -> list[int]:
    return server.engine().tokenizer.encode(text)


def test_texts_and_token_ids_in_their_order(server: ServerThread):
    client = server.openai()
    ids = [ids_of(server, text) for text in TEXTS]
    for given, prompts in ((TEXTS[0], ids[:1]), (TEXTS, ids), (ids[1], ids[1:2]), (ids, ids)):
        made = client.embeddings.create(model="embedder", input=given, encoding_format="float")
        assert [item.index for item in made.data] == list(range(len(prompts)))
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, prompts))
        for item, prompt in zip(made.data, prompts, strict=True):
            np.testing.assert_allclose(item.embedding, expected(server, prompt), atol=1e-5)


def test_base64_is_what_the_client_asks_for_by_itself(server: ServerThread):
    """`openai` asks for base64 unless told otherwise, and decodes it."""
    made = server.openai().embeddings.create(model="embedder", input=TEXTS[0])
    np.testing.assert_allclose(made.data[0].embedding, expected(server, ids_of(server, TEXTS[0])), atol=1e-5)
    with server.client() as client:
        answer = client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(made.data[0].embedding))


def test_fewer_dimensions(server: ServerThread):
    made = server.openai().embeddings.create(model="embedder", input=TEXTS[1], dimensions=5)
    np.testing.assert_allclose(made.data[0].embedding, expected(server, ids_of(server, TEXTS[1]), 5), atol=1e-5)


def test_more_inputs_than_places(server: ServerThread):
    texts = [f"Text number {number}" for number in range(100)]
    made = server.openai().embeddings.create(model="embedder", input=texts)
    for number in (0, 31, 32, 99):
        want = expected(server, ids_of(server, texts[number]))
        np.testing.assert_allclose(made.data[number].embedding, want, atol=1e-5)
    assert server.state.admission.in_flight == 0


def test_pooling_has_vllms_form(server: ServerThread):
    with server.client() as client:
        body = {"model": "embedder", "input": TEXTS[:2], "task": "embed", "normalize": False}
        answer = client.post("/pooling", json=body).json()
    assert answer["id"].startswith("pool-")
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(server, text)) for text in TEXTS[:2])
    for item, text in zip(answer["data"], TEXTS, strict=False):
        assert item["object"] == "pooling"
        vector = np.array(item["data"])
        np.testing.assert_allclose(vector / np.linalg.norm(vector), expected(server, ids_of(server, text)), atol=1e-5)
        assert abs(np.linalg.norm(vector) - 1) > 0.01


def test_langchain_embeds_documents(server: ServerThread):
    langchain = pytest.importorskip("langchain_openai")
    embeddings = langchain.OpenAIEmbeddings(
        model="embedder", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    for vector, text in zip(embeddings.embed_documents(TEXTS), TEXTS, strict=True):
        np.testing.assert_allclose(vector, expected(server, ids_of(server, text)), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "length"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": [1, "a"]}, "input[0]", "mixes"),
        ({"input": [99999]}, "input", "outside the vocabulary"),
        ({"input": ["a"] * 101}, "input", "at most 100"),
        ({"input": [[1], [2] * 65]}, "input[1]", "has 65 tokens; the context holds 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": 33}, "dimensions", "1 to 32"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "input", "leaves nothing"),
        ({"input": {"text": "a"}}, "input", "object"),
        ({}, "input", "required"),
    ],
)
def test_what_is_refused_names_the_field(server: ServerThread, fields: dict, param: str, said: str):
    for path in ("/v1/embeddings", "/pooling"):
        with server.client() as client:
            answer = client.post(path, json={"model": "embedder", **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert said in error["message"], error
    assert server.state.admission.in_flight == 0


def test_long_inputs_are_cut_where_that_is_asked_for(server: ServerThread):
    for limit, kept in ((-1, CONTEXT), (3, 3)):
        extra = {"truncate_prompt_tokens": limit}
        made = server.openai().embeddings.create(model="embedder", input=[[5] * 99], extra_body=extra)
        assert made.usage.prompt_tokens == kept


def test_score_is_the_cosine_of_two_texts(server: ServerThread):
    with server.client() as client:
        answer = client.post("/score", json={"text_1": TEXTS[0], "text_2": [TEXTS[1], TEXTS[0]]}).json()
        assert client.post("/score", json={"text_1": "a", "text_2": "b" * 999}).status_code == 400
    vectors = [expected(server, ids_of(server, text)) for text in TEXTS[:2]]
    first, same = answer["data"]
    assert first["score"] == pytest.approx(vectors[0] @ vectors[1], abs=1e-5)
    assert same["score"] == pytest.approx(1.0, abs=1e-5)
    assert "tokens" not in first
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids_of(server, TEXTS[0])) + len(ids_of(server, TEXTS[1]))


def test_the_engine_is_ready_counted_and_generates_nothing(server: ServerThread):
    with server.client() as client:
        assert client.get("/ready").status_code == 200
        before = server.stats().prompt_tokens
        client.post("/v1/embeddings", json={"input": [[1, 2, 3]]})
        assert server.stats().prompt_tokens == before + 3
        assert 'request_success_total{engine="0",finished_reason="stop"' in client.get("/metrics").text
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            answer = client.post(path, json={"model": "embedder", **body})
            assert answer.status_code == 400
            assert "embeds" in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="embeds"):
        server.openai().completions.create(model="embedder", prompt="a")
