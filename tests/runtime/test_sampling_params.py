"""Validation of `SamplingParams`: the name, the value and the range of each field; cases 6 and 16."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from runtime.errors import RequestError
from runtime.sampling.params_check import MAX_LOGPROB_ENTRIES
from runtime.sampling_params import SamplingParams

VOCAB, CONTEXT = 1000, 100


def verify(prompt_len: int | None = 10, max_logprobs: int = 20, **fields) -> None:
    SamplingParams(**fields).verify(
        vocab_size=VOCAB, max_context_len=CONTEXT, prompt_len=prompt_len, max_logprobs=max_logprobs
    )


VALID = [
    {},
    {"n": 3, "best_of": 5},
    {"temperature": 0.0},
    {"temperature": 0},
    {"temperature": 1e-9},
    {"temperature": 1e30},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**9},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1.0},
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"stop": "x"},
    {"stop": []},
    {"stop": ["a", "b"]},
    {"stop_token_ids": []},
    {"stop_token_ids": [0, VOCAB - 1]},
    {"max_tokens": None},
    {"max_tokens": 90},
    {"min_tokens": 16, "max_tokens": 16},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 20},
    {"logit_bias": {3: -100, 5: 100.0}},
    {"allowed_token_ids": [1]},
    {"bad_words": ["x"]},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 5},
    {"beam_width": 4, "n": 4, "temperature": 0.0},
    {"beam_width": 4, "early_stopping": True, "length_penalty": -1.0, "top_k": -1},
    {"structured_outputs": {"regex": "a"}},
]


@pytest.mark.parametrize("fields", VALID)
def test_valid(fields):
    verify(**fields)


NUMBERS = [math.nan, math.inf, -math.inf, "1", True, None, [1], {}, 1 + 0j]
FLOATS = {
    "presence_penalty": (-2.01, 2.01),
    "frequency_penalty": (-2.01, 2.01),
    "repetition_penalty": (0.0, -1.0, 1e9, 1e-9),
    "temperature": (-0.1, -1e-9),
    "top_p": (0.0, -0.1, 1.01),
    "min_p": (-0.01, 1.01),
    "typical_p": (0.0, 1.01),
    "length_penalty": (1e9,),
}
INTS = {
    "n": (0, -1, 10**9),
    "best_of": (0, 10**9),
    "top_k": (-2,),
    "seed": (2**64, -(2**63) - 1),
    "max_tokens": (0, -1),
    "min_tokens": (-1,),
    "logprobs": (-2, 21),
    "prompt_logprobs": (-2, 21),
    "truncate_prompt_tokens": (-2, CONTEXT + 1, 0),
    "beam_width": (-1, 10**6),
}
OPTIONAL = {"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
INVALID = (
    [(name, value) for name, values in FLOATS.items() for value in (*values, *NUMBERS)]
    + [(name, value) for name, values in INTS.items() for value in (*values, 1.5, *NUMBERS)]
    + [
        (name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        for value in (None, 1, "yes")
    ]
    + [("early_stopping", "never"), ("spaces_between_special_tokens", 0)]
    + [("stop", value) for value in ("", [""], [1], 1, ["a"] * 65, ["x" * 5000], {"a": 1}, b"x")]
    + [
        (name, value)
        for name in ("stop_token_ids", "allowed_token_ids")
        for value in ([-1], [VOCAB], [1.0], [True], "1", 3)
    ]
    + [("allowed_token_ids", [])]
    + [("bad_words", value) for value in ("x", [""], [1], ["x"] * 2000)]
    + [
        ("logit_bias", value)
        for value in (
            [1],
            {VOCAB: 1.0},
            {-1: 1.0},
            {"a": 1.0},
            {1: 101},
            {1: math.nan},
            {1: "x"},
            {1: True},
            {True: 1.0},
        )
    ]
    + [("structured_outputs", value) for value in ([], {}, {"regex": 1})]
    + [("extra_args", 3)]
)


@pytest.mark.parametrize(("name", "value"), [case for case in INVALID if not (case[0] in OPTIONAL and case[1] is None)])
def test_each_invalid_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        verify(**{name: value})
    assert caught.value.param.split(".")[0] == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3)])
def test_numpy_scalars_are_no_surprise(value):
    """Either accepted as the number it is, or refused by name."""
    with pytest.raises(RequestError, match="temperature"):
        verify(temperature=value)


CONFLICTS = [
    ({"n": 3, "best_of": 2}, "best_of", "best_of = 2 with n = 3"),
    ({"n": 2, "temperature": 0.0}, "n", "n must be 1 with greedy sampling"),
    ({"best_of": 2, "temperature": 0.0}, "best_of", "best_of must be 1 with greedy sampling"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens = 17 with max_tokens = 16"),
    ({"stop": "x", "detokenize": False}, "stop", "detokenize"),
    ({"beam_width": 2, "n": 3}, "beam_width", "beam_width = 2 with n = 3"),
    ({"beam_width": 2, "top_p": 0.5}, "top_p", "beam search"),
    ({"beam_width": 2, "top_k": 5}, "top_k", "beam search"),
    ({"beam_width": 2, "temperature": 0.7}, "temperature", "beam search does not sample"),
    ({"beam_width": 2, "best_of": 3}, "best_of", "beam search"),
    ({"beam_width": 2, "logprobs": 0}, "logprobs", "beam search"),
    ({"beam_width": 2, "stop": "x"}, "stop", "beam search"),
    ({"beam_width": 2, "structured_outputs": {"regex": "a"}}, "structured_outputs", "beam search"),
]


@pytest.mark.parametrize(("fields", "param", "message"), CONFLICTS)
def test_conflicts(fields, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        verify(**fields)
    assert caught.value.param == param


def test_case_6_stop_without_text_is_refused():
    with pytest.raises(RequestError, match="stop needs the text"):
        verify(stop=["x"], detokenize=False)


def test_case_16_prompt_and_max_tokens_over_the_context():
    verify(prompt_len=84, max_tokens=16)
    with pytest.raises(RequestError) as caught:
        verify(prompt_len=85, max_tokens=16)
    for number in ("85", "16", "101", "100", "15"):  # the two, their sum, the limit, and what would fit
        assert number in str(caught.value)
    assert caught.value.param == "max_tokens"
    verify(prompt_len=99, max_tokens=None)
    with pytest.raises(RequestError, match=r"100 tokens; .* context of 100"):
        verify(prompt_len=100, max_tokens=None)
    with pytest.raises(RequestError, match="max_tokens"):
        verify(max_tokens=10**30)
    with pytest.raises(RequestError, match="min_tokens"):
        verify(prompt_len=50, max_tokens=None, min_tokens=60)
    with pytest.raises(RequestError, match="empty"):
        verify(prompt_len=0)


def test_whole_vocabulary_logprobs_are_bounded_by_max_logprobs():
    with pytest.raises(RequestError, match=r"whole vocabulary of 1000.* max_logprobs = 20"):
        verify(logprobs=-1)
    verify(logprobs=-1, max_logprobs=-1)
    verify(logprobs=-1, max_logprobs=VOCAB)
    verify(logprobs=VOCAB, max_logprobs=10 * VOCAB)


def test_log_probabilities_are_refused_before_any_allocation():
    """Whole-vocabulary prompt log probabilities of a long prompt: refused with the numbers, for the numbers alone."""
    params = SamplingParams(prompt_logprobs=-1, max_tokens=8)
    with pytest.raises(RequestError) as caught:
        params.verify(vocab_size=150_000, max_context_len=10_000, prompt_len=9_000, max_logprobs=-1)
    for number in ("9000 prompt tokens", str(9_000 * 150_001), str(MAX_LOGPROB_ENTRIES)):
        assert number in str(caught.value)
    params.verify(vocab_size=150_000, max_context_len=10_000, prompt_len=6, max_logprobs=-1)
    with pytest.raises(RequestError, match="entries"):
        SamplingParams(logprobs=-1, max_tokens=None).verify(vocab_size=150_000, max_context_len=10_000, max_logprobs=-1)


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), anything, max_size=4))
def test_whatever_comes_is_accepted_or_refused_by_name(fields):
    fields.pop("bad_words_token_ids", None)  # not a client's
    refusal = None
    try:
        verify(**fields)
    except RequestError as error:
        refusal = error
    assert refusal is None or refusal.param


def test_the_wire_keeps_every_field():
    params = SamplingParams(
        n=2,
        seed=2**64 - 1,
        stop=["a"],
        logit_bias={3: 1.5},
        structured_outputs={"json": {"type": "object"}},
        bad_words_token_ids=[[1, 2]],
        extra_args={"x": 1},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.encode(SamplingParams()) == b"{}"


def test_with_seed():
    assert SamplingParams(seed=5).with_seed().seed == 5
    seeds = {SamplingParams().with_seed().seed for _ in range(8)}
    assert len(seeds) == 8
    for seed in seeds:
        verify(seed=seed)


def test_bad_words_are_resolved_at_the_start_and_after_a_space():
    tokenizer = tiny_tokenizer()
    params = SamplingParams(bad_words=["the", " fox"]).resolved(tokenizer)
    texts = [tokenizer.decode(ids) for ids in params.bad_words_token_ids]
    assert "the" in texts
    assert " the" in texts
    assert params.seed is not None
    assert SamplingParams(seed=1).resolved(tokenizer).bad_words_token_ids is None


def test_bad_words_that_are_spaces():
    assert SamplingParams(bad_words=[" ", "  "]).resolved(tiny_tokenizer()).bad_words_token_ids
