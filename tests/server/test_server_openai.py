"""The OpenAI routes, driven by the real `openai` client."""

from __future__ import annotations

import json

import openai
import pytest
from server_harness import ServerThread


def text_of(stream) -> tuple[str, str | None]:
    """(text, finish reason) of a streamed answer of either kind."""
    text, finish = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_models_are_listed_and_found_by_name(server: ServerThread):
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="holds: tiny"):
        client.models.retrieve("gpt-5")


def test_a_completion_has_text_reason_and_counts(server: ServerThread):
    done = server.openai().completions.create(model="tiny", prompt="Paris is", max_tokens=8, temperature=0)
    assert done.choices[0].finish_reason == "length"
    assert done.choices[0].text
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 8, 11)


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_equals_the_unstreamed(server: ServerThread, n: int):
    request = {"model": "tiny", "prompt": "The capital", "max_tokens": 24, "temperature": 1.0, "seed": 7, "n": n}
    whole = server.openai().completions.create(**request)
    texts, finishes, usage = [""] * n, [None] * n, None
    for chunk in server.openai().completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_prompts_come_as_text_texts_ids_and_lists_of_ids(server: ServerThread):
    client = server.openai()

    def texts(prompt) -> list[str]:
        done = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
        return [choice.text for choice in done.choices]

    tokenizer = server.engine().tokenizer
    first, second = tokenizer.encode("Paris is"), tokenizer.encode("DEF")
    alone = texts("Paris is") + texts("DEF")
    assert texts(["Paris is", "DEF"]) == alone
    assert texts(first) == alone[:1]
    assert texts([first, second]) == alone


def test_echo_gives_back_the_prompt_and_its_log_probabilities(server: ServerThread):
    client = server.openai()
    done = client.completions.create(
        model="tiny", prompt="Paris is", max_tokens=2, temperature=0, echo=True, logprobs=1
    )
    choice = done.choices[0]
    assert choice.text.startswith("Paris is")
    assert choice.logprobs.tokens[:3] == ["Par", "is", " is"]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[:4] == [0, 3, 5, 8]
    # A prompt alone is scored without a token of output, as evaluation harnesses ask for it.
    scored = client.completions.create(model="tiny", prompt="Paris is", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "Paris is"
    assert scored.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:3]
    assert scored.usage.completion_tokens == 0


def test_best_of_returns_the_likeliest_and_does_not_stream(server: ServerThread):
    client = server.openai()
    request = {"model": "tiny", "prompt": "Paris", "max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 0}
    every = client.completions.create(**request, n=6)
    likelihood = {choice.text: sum(choice.logprobs.token_logprobs) for choice in every.choices}
    best = client.completions.create(**request, n=1, best_of=6)
    assert [choice.text for choice in best.choices] == [max(likelihood, key=likelihood.__getitem__)]
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**request, best_of=6, stream=True)


def test_beam_search_over_http(server: ServerThread):
    done = server.openai().completions.create(
        model="tiny", prompt="Paris", max_tokens=5, n=2, extra_body={"use_beam_search": True, "best_of": 4}
    )
    assert len({choice.text for choice in done.choices}) == 2


def test_a_chat_repeats_what_it_is_told(parrot_server: ServerThread):
    client = parrot_server.openai()
    request = {"model": "parrot", "messages": [{"role": "user", "content": "Größe, ďábel, 日本語"}], "temperature": 0}
    done = client.chat.completions.create(**request)
    assert done.choices[0].message.content == "Größe, ďábel, 日本語"
    assert done.choices[0].finish_reason == "stop"
    assert done.object == "chat.completion"
    assert text_of(client.chat.completions.create(**request, stream=True)) == ("Größe, ďábel, 日本語", "stop")


def test_chat_streams_usage_when_asked(parrot_server: ServerThread):
    request = {"model": "parrot", "messages": [{"role": "user", "content": "one two three"}], "stream": True}
    client = parrot_server.openai()
    chunks = list(client.chat.completions.create(**request, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 2
    assert all(chunk.usage is None for chunk in chunks[:-1])
    every = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in client.chat.completions.create(**request, stream_options=every)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == chunks[-1].usage.completion_tokens


def test_content_parts_are_text_and_other_parts_are_refused(parrot_server: ServerThread):
    client = parrot_server.openai()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    done = client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": parts}])
    assert done.choices[0].message.content == "one\ntwo"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[1\]"):
        client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": [parts[0], image]}])


def test_a_final_message_is_continued(server: ServerThread):
    """`continue_final_message`: the prompt ends in the assistant's own words, with no end mark after them."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    with server.client() as client:
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert text.endswith("<|im_start|>assistant\nThe answer is")
        both = client.post("/v1/chat/completions", json=body | {"add_generation_prompt": True})
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "continue_final_message"
        echoed = client.post("/v1/chat/completions", json=body | {"echo": True, "max_tokens": 3}).json()
        assert echoed["choices"][0]["message"]["content"].startswith("The answer is")


def test_token_ids_are_returned_when_asked(server: ServerThread):
    with server.client() as client:
        body = {"prompt": "Paris is", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    tokenizer = server.engine().tokenizer
    assert choice["prompt_token_ids"] == tokenizer.encode("Paris is")
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]


def test_prompt_logprobs_as_vllm_gives_them(server: ServerThread):
    with server.client() as client:
        body = {"prompt": "Paris is", "max_tokens": 1, "prompt_logprobs": 2}
        positions = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    ids = server.engine().tokenizer.encode("Paris is")
    assert positions[0] is None
    for token, position in zip(ids[1:], positions[1:], strict=True):
        assert position[str(token)]["logprob"] < 0
        assert len(position) in (2, 3)


def test_score_sums_a_continuations_log_probability(server: ServerThread):
    with server.client() as client:
        scored = client.post("/score", json={"text_1": "Paris", "text_2": [" is", " DEF"]}).json()["data"]
        body = {"prompt": "Paris is", "max_tokens": 1, "prompt_logprobs": 0}
        last = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"][-1]
    assert scored[0]["tokens"] == 1
    assert scored[0]["score"] == pytest.approx(next(iter(last.values()))["logprob"])


def test_log_line_shapes_of_a_stream(server: ServerThread):
    """Byte for byte: every event is `data: JSON` and a blank line, the last is `[DONE]`."""
    with server.client() as client:
        raw = client.post("/v1/completions", json={"prompt": "Paris", "max_tokens": 9, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"
