"""What callers read: text, stop strings, log probabilities with bytes, the n best, resumption; cases 1, 2, 7."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import SENTENCES, tiny_tokenizer

from runtime.errors import (
    EngineDeadError,
    GenerationError,
    OverloadedError,
    PlancastError,
    QueueTimeoutError,
    RequestError,
)
from runtime.logprobs import RowLogprobs
from runtime.messages import AbortRequests, EngineRequest, RequestDelta, SequenceDelta, TokenLogprobs
from runtime.output_processor import OutputProcessor
from runtime.outputs import RequestOutput
from runtime.sampling.rows import ChunkedExp
from runtime.sampling_params import SamplingParams

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def request(request_id: str = "r", prompt: str = "The", **params) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=ids_of(prompt), params=SamplingParams(**params), arrival_time=1.0
    )


def delta(*sequences: SequenceDelta, request_id: str = "r", finished: bool | None = None, **fields) -> RequestDelta:
    if finished is None:
        finished = bool(sequences) and all(s.finish_reason for s in sequences)
    return RequestDelta(request_id=request_id, sequences=list(sequences), finished=finished, **fields)


def run(ids, *, chunk=1, finish="length", stop_reason=None, tokenizer=TOKENIZER, stream=True, **params):
    """Feed one sequence's ids in chunks. Returns the outputs and the aborts."""
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(**params), "The", stream=stream)
    outputs, aborts = [], []
    for start in range(0, len(ids), chunk):
        last = start + chunk >= len(ids)
        new = SequenceDelta(0, ids[start : start + chunk])
        if last:
            new.finish_reason, new.stop_reason = finish, stop_reason
        found, abort = processor.process([delta(new)])
        outputs += found
        aborts += [abort] if abort else []
    return outputs, aborts


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs if output.outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs if output.outputs for token_id in output.outputs[0].token_ids]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("text", SENTENCES)
def test_streamed_text_equals_the_whole(text, chunk):
    ids = ids_of(text)
    streamed, _ = run(ids, chunk=chunk)
    whole, _ = run(ids, chunk=chunk, stream=False)
    assert text_of(streamed) == text
    assert [output.outputs[0].text for output in whole] == [text]
    assert whole[0].outputs[0].token_ids == ids
    assert tokens_of(streamed) == ids
    assert whole[0].finished
    assert [output.finished for output in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1].outputs[0].finish_reason == "length"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=30).filter(bool),
    st.integers(1, 7),
    st.lists(st.text("etaoin \ufffdďD", min_size=1, max_size=3), max_size=3),
    st.integers(0, 5),
    st.booleans(),
)
def test_random_ids_in_any_chunks(ids, chunk, stop, min_tokens, include):
    """However many tokens a step brings, streaming or not: the same text, tokens, reason."""

    def outcome(chunk, stream):
        outputs, _ = run(
            ids, chunk=chunk, stream=stream, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include
        )
        last = outputs[-1].outputs[-1]
        tokens = tokens_of(outputs)
        return text_of(outputs), tokens, last.finish_reason, last.stop_reason

    alone = outcome(1, True)
    assert outcome(chunk, True) == alone
    assert outcome(chunk, False) == alone
    if not stop:
        assert alone[0] == TOKENIZER.decode(ids)


@pytest.mark.parametrize(("stop", "text", "kept"), [("DE", "xDEFy", "x"), ("Pari", "In Paris", "In ")])
@pytest.mark.parametrize("chunk", [1, 100])
def test_cases_1_and_2_stop_string_inside_a_token(stop, text, kept, chunk):
    outputs, aborts = run([*ids_of(text), *ids_of(" and more")], chunk=chunk, stop=stop)
    assert text_of(outputs) == kept
    last = outputs[-1]
    assert last.finished
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", stop)
    # The core is told, unless it was over by itself in the same step.
    assert aborts == ([] if chunk == 100 else [AbortRequests(request_ids=["r"], sequences=[])])
    tokens = tokens_of(outputs)
    assert TOKENIZER.decode(tokens).startswith(kept + stop)
    assert " and more" not in TOKENIZER.decode(tokens)


def test_stop_string_included_on_request():
    outputs, _ = run(ids_of("The answer is 42. Yes"), stop=["42"], include_stop_str_in_output=True)
    assert text_of(outputs) == "The answer is 42"


def test_stop_string_in_held_bytes_at_the_end():
    """SentencePiece spells a word in byte tokens, which are text only when their run is over."""
    tokenizer = tiny_tokenizer("byte_fallback")
    spelled = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in b"stop it"]
    outputs, _ = run(spelled, tokenizer=tokenizer, stop=["op"])
    assert text_of(outputs) == "st"
    assert outputs[-1].outputs[0].finish_reason == "stop"


def test_late_deltas_of_a_stopped_request_are_dropped():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(stop=["x"]), stream=True)
    outputs, abort = processor.process([delta(SequenceDelta(0, ids_of("x")))])
    assert outputs[0].finished
    assert abort.request_ids == ["r"]
    assert processor.process([delta(SequenceDelta(0, ids_of("y")))]) == ([], None)
    assert len(processor) == 0


def test_eos_and_stop_tokens_are_no_text_but_are_tokens():
    the, end = ids_of("The"), TOKENIZER.token_to_id("z")
    outputs, _ = run([*the, end], finish="stop", stop_reason=end)
    assert text_of(outputs) == "The"
    assert tokens_of(outputs) == [*the, end]
    assert outputs[-1].outputs[0].stop_reason == end
    outputs, _ = run([*the, end], finish="stop", stop_reason=end, include_stop_str_in_output=True)
    assert text_of(outputs) == "Thez"
    outputs, _ = run([*the, EOS], finish="stop", skip_special_tokens=False)
    assert text_of(outputs) == "The"


def test_special_tokens_shown_on_request():
    outputs, _ = run([*ids_of("The"), EOS, *ids_of("x")], skip_special_tokens=False)
    assert text_of(outputs) == "The<|im_end|>x"
    assert text_of(run([*ids_of("The"), EOS, *ids_of("x")])[0]) == "Thex"


def test_without_detokenizing():
    outputs, _ = run(ids_of("The end"), detokenize=False)
    assert text_of(outputs) == ""
    assert tokens_of(outputs) == ids_of("The end")


def test_output_continues_the_prompt():
    tokenizer = tiny_tokenizer("byte_fallback")
    ids = tokenizer.encode("The quick", add_special_tokens=False)
    processor = OutputProcessor(tokenizer)
    wanted = EngineRequest(request_id="r", prompt_token_ids=ids, params=SamplingParams(), arrival_time=0.0)
    processor.add_request(wanted)
    output = processor.process(
        [delta(SequenceDelta(0, tokenizer.encode("fox", add_special_tokens=False), None, "length"))]
    )
    assert output[0][0].outputs[0].text == " fox"


# Several sequences


def test_n_sequences_one_of_which_stops_by_a_string():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, stop=["x"]), stream=True)
    a, x = ids_of("a"), ids_of("x")
    outputs, abort = processor.process([delta(SequenceDelta(0, a), SequenceDelta(1, a))])
    assert [o.index for o in outputs[0].outputs] == [0, 1]
    outputs, abort = processor.process([delta(SequenceDelta(0, a), SequenceDelta(1, x))])
    assert abort == AbortRequests(request_ids=[], sequences=[("r", 1)])
    assert not outputs[0].finished
    assert outputs[0].outputs[1].finish_reason == "stop"
    # A delta of the stopped one may still be on its way.
    outputs, abort = processor.process([delta(SequenceDelta(0, a), SequenceDelta(1, a))])
    assert abort is None
    assert [o.index for o in outputs[0].outputs] == [0]
    outputs, abort = processor.process([delta(SequenceDelta(0, a, None, "length"), finished=True)])
    assert outputs[0].finished
    assert abort is None
    assert len(processor) == 0


def test_last_of_n_sequences_stopped_by_a_string_ends_the_request():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, stop=["x"]), stream=True)
    a, x = ids_of("a"), ids_of("x")
    processor.process([delta(SequenceDelta(0, a, None, "stop"), SequenceDelta(1, a), finished=False)])
    outputs, abort = processor.process([delta(SequenceDelta(1, x))])
    assert outputs[0].finished
    assert abort == AbortRequests(request_ids=["r"], sequences=[])


def test_best_of_returns_the_likeliest():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, best_of=3))
    finals = [
        SequenceDelta(i, ids_of(t), None, "length", None, p)
        for i, (t, p) in enumerate([("a", -3), ("b", -1), ("c", -2)])
    ]
    outputs, _ = processor.process([delta(*finals)])
    assert [(o.index, o.text, o.cumulative_logprob) for o in outputs[0].outputs] == [(0, "b", -1), (1, "c", -2)]
    with pytest.raises(RequestError, match="cannot be streamed") as caught:
        processor.add_request(request("s", n=2, best_of=3), stream=True)
    assert caught.value.param == "best_of"


def test_beam_hypotheses_replace_what_there_was():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, beam_width=2))
    assert processor.process([delta(SequenceDelta(0, ids_of("junk")))]) == ([], None)
    finals = [
        SequenceDelta(i, ids_of(t), None, "length", None, -1.0 - i, True) for i, t in enumerate(["best", "second"])
    ]
    outputs, _ = processor.process([delta(*finals)])
    assert [o.text for o in outputs[0].outputs] == ["best", "second"]
    assert [o.cumulative_logprob for o in outputs[0].outputs] == [-1.0, -2.0]


def test_fewer_beams_than_asked_for():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, beam_width=2))
    outputs, _ = processor.process(
        [delta(SequenceDelta(0, ids_of("one"), None, "length", None, -1.0, True), finished=True)]
    )
    assert [o.text for o in outputs[0].outputs] == ["one"]


# Log probabilities


def test_case_7_bytes_and_text_of_tokens_and_alternatives():
    halves = [TOKENIZER.token_to_id(alias) for alias in ("Ä", "ı")]  # byte-level aliases of C4 and 8F: "ď"
    word = TOKENIZER.token_to_id("Ġthe")
    entry = TokenLogprobs([halves[0], word, halves[1]], [-0.5, -1.0, -2.0], [1, 2, 3])
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(logprobs=2))
    outputs, _ = processor.process([delta(SequenceDelta(0, [halves[0]], [entry], "length", None, -0.5))])
    found = outputs[0].outputs[0].logprobs[0]
    assert list(found) == [halves[0], word, halves[1]]
    assert [entry.token_bytes for entry in found.values()] == [b"\xc4", b" the", b"\x8f"]
    assert [entry.decoded_token for entry in found.values()] == ["\\xc4", " the", "\\x8f"]
    assert [entry.logprob for entry in found.values()] == [-0.5, -1.0, -2.0]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_token_bytes_make_up_the_text(kind):
    tokenizer = tiny_tokenizer(kind)
    for text in SENTENCES[:3] if kind != "metaspace" else SENTENCES[:1]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert joined.removeprefix("" if kind == "byte_level" else " ") == text


def test_the_sampled_token_is_not_listed_twice():
    entry = RowLogprobs(np.array([1.0, 3.0, 2.0], np.float32), ChunkedExp(3)).gather(1, 2)
    assert entry.token_ids == [1, 1, 2]
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(logprobs=2))
    outputs, _ = processor.process([delta(SequenceDelta(0, [1], [entry], "length", None, -0.5))])
    found = outputs[0].outputs[0].logprobs[0]
    assert [(i, entry.rank) for i, entry in found.items()] == [(1, 1), (2, 2)]


def test_log_probabilities_after_a_stop_string_are_cut_with_their_tokens():
    ids = [*ids_of("a"), *ids_of("x"), *ids_of("b")]
    entries = [TokenLogprobs([i], [-1.0 - n], [1]) for n, i in enumerate(ids)]
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(logprobs=0, stop=["x"]))
    outputs, abort = processor.process([delta(SequenceDelta(0, ids, entries, None, None, -6.0))])
    output = outputs[0].outputs[0]
    assert output.token_ids == ids[:2]
    assert len(output.logprobs) == 2
    assert output.cumulative_logprob == pytest.approx(-3.0)
    assert abort.request_ids == ["r"]


def test_prompt_logprobs_come_in_parts_and_are_not_sent_twice():
    wanted = request(prompt_logprobs=0, max_tokens=4)
    entries = [None, *(TokenLogprobs([i], [-float(i)], [1]) for i in wanted.prompt_token_ids[1:])]
    entries += [TokenLogprobs([9], [-9.0], [1])]
    wanted.prompt_token_ids.append(9)
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(wanted, stream=True)
    first, _ = processor.process([delta(prompt_logprobs=entries[:1])])
    resumed = processor.resume_request("r")  # the core died in the middle of the prompt: it sends all again
    assert resumed.params.prompt_logprobs == 0
    second, _ = processor.process([delta(prompt_logprobs=entries)])
    assert len(first[0].prompt_logprobs + second[0].prompt_logprobs) == len(entries)
    assert first[0].prompt_logprobs == [None]
    assert second[0].prompt_logprobs[-1][9].logprob == -9.0
    assert processor.resume_request("r").params.prompt_logprobs is None
    assert wanted.params.prompt_logprobs == 0


# Life of a request


def test_resume_goes_on_where_the_streams_are():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=3, stop=["x"], max_tokens=50), stream=True)
    a, b, x = ids_of("a"), ids_of("b"), ids_of("x")
    processor.process([delta(*(SequenceDelta(i, a, None, None, None, -1.0) for i in range(3)))])
    processor.process([delta(SequenceDelta(0, b, None, None, None, -3.0), SequenceDelta(1, x, None, None, None, -2.0))])
    resumed = processor.resume_request("r")
    assert resumed.resume_token_ids == [a + b, a + x, a]
    assert resumed.resume_finished == [1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(resumed), type=EngineRequest) == resumed
    # The fresh core counts log probabilities from the resume on.
    outputs, _ = processor.process([delta(SequenceDelta(0, b, None, "length", None, -0.5), finished=False)])
    assert outputs[0].outputs[0].cumulative_logprob == -3.5
    assert outputs[0].outputs[0].text == "b"
    with pytest.raises(KeyError):
        processor.resume_request("unknown")


def test_resume_of_beams_starts_anew():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(n=2, beam_width=4))
    assert processor.resume_request("r").resume_token_ids is None


def test_abort_sends_what_was_held():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(stop=["abcd"]), stream=True)
    processor.process([delta(SequenceDelta(0, ids_of("ab")))])
    (output,) = processor.abort(["r", "unknown"])
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "ab"
    assert "r" not in processor


def test_remove_request_is_silent():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request())
    processor.remove_request("r")
    processor.remove_request("r")
    assert processor.request_ids == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("request", RequestError),
        ("overloaded", OverloadedError),
        ("queue_timeout", QueueTimeoutError),
        ("engine", EngineDeadError),
        ("generation", GenerationError),
        (None, PlancastError),
    ],
)
def test_errors_have_their_class(kind, error):
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request())
    outputs, abort = processor.process([RequestDelta(request_id="r", finished=True, error="no", error_kind=kind)])
    assert type(outputs[0].error) is error
    assert str(outputs[0].error) == "no"
    assert abort is None
    assert len(processor) == 0
    processor.add_request(request())
    (output,) = processor.fail(["r"], EngineDeadError("gone"))
    assert isinstance(output.error, EngineDeadError)


def test_metrics():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request(), stream=True)
    processor.process([delta(SequenceDelta(0, ids_of("a")), first_scheduled_time=2.0, num_cached_tokens=8)])
    outputs, _ = processor.process([delta(SequenceDelta(0, ids_of("b"), None, "length"), num_preemptions=1)])
    metrics = outputs[0].metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (1.0, 2.0)
    assert metrics.first_token_time <= metrics.finished_time
    assert (metrics.num_cached_tokens, metrics.num_preemptions) == (8, 1)


def test_refusals():
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(request())
    with pytest.raises(RequestError, match="in use"):
        processor.add_request(request())
    with pytest.raises(RequestError, match="needs a tokenizer"):
        OutputProcessor(None).add_request(request(stop=["x"]))
