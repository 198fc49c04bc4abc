"""Logits processors against transformers' where it has the same one, and the token sequences of bad words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.logits_processors import BadWords, LogitsProcessor, MinTokens, Penalties, build_processors
from runtime.sampling_params import SamplingParams

VOCAB = 40


def row(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def ours(params: SamplingParams, prompt, output, logits) -> np.ndarray:
    result = logits.copy()
    for processor in build_processors(params, prompt, [0]):
        for token_id in output:
            processor.append(token_id)
        processor.apply(result)
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=50, deadline=None)
@given(tokens.filter(bool), tokens, st.sampled_from([0.5, 1.2, 3.0]))
def test_repetition_penalty_equals_transformers(prompt, output, penalty):
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = row()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), torch.tensor(logits[None]))[0]
    got = ours(SamplingParams(repetition_penalty=penalty), prompt, output, logits)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)


@settings(max_examples=80, deadline=None)
@given(tokens, st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4))
def test_bad_words_equal_transformers_where_only_the_output_counts(output, words):
    torch = pytest.importorskip("torch")
    from transformers import NoBadWordsLogitsProcessor

    output = [token % 7 for token in output]
    if not output:
        return
    logits = row()
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([output]), torch.tensor(logits[None]))[0]
    got = ours(SamplingParams(bad_words_token_ids=words), [5, 5], output, logits)
    np.testing.assert_array_equal(got, expected.numpy())


def test_bad_words_do_not_reach_into_the_prompt():
    got = ours(SamplingParams(bad_words_token_ids=[[5, 6]]), [5], [], row())
    np.testing.assert_array_equal(got, row())
    assert ours(SamplingParams(bad_words_token_ids=[[5, 6]]), [], [5], row())[6] == -np.inf


@settings(max_examples=50, deadline=None)
@given(tokens, tokens)
def test_frequency_and_presence_by_definition(prompt, output):
    logits = row(1)
    expected = logits.astype(np.float64)
    for token_id in set(output):
        expected[token_id] -= 0.7 * output.count(token_id) + 0.4
    got = ours(SamplingParams(frequency_penalty=0.7, presence_penalty=0.4), prompt, output, logits)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_penalties_keep_up_with_many_tokens():
    """The table of seen tokens grows past its first size, on a fork alone too."""
    penalties = Penalties(SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0), range(10))
    for token_id in range(1000):
        penalties.append(token_id % 500)
    fork = penalties.fork()
    for token_id in range(500, 900):
        fork.append(token_id)
    logits = np.ones(1000, np.float32)
    penalties.apply(logits)
    np.testing.assert_array_equal(logits, np.where(np.arange(1000) < 500, np.float32(0.5 - 2), 1))
    logits = np.ones(1000, np.float32)
    fork.apply(logits)
    assert logits[600] == -0.5
    assert logits[950] == 1


def test_min_tokens_counts_down_and_back():
    processor = MinTokens(2, [0, 3])
    for expected in (True, True, False):
        logits = np.zeros(5, np.float32)
        processor.apply(logits)
        assert bool(np.isinf(logits[[0, 3]]).all()) is expected
        processor.append(1)
    processor.rewind([1, 1])
    logits = np.zeros(5, np.float32)
    processor.apply(logits)
    assert np.isinf(logits[0])


def test_order_of_the_built_ins_and_the_protocol():
    params = SamplingParams(
        allowed_token_ids=[1],
        bad_words_token_ids=[[2]],
        min_tokens=1,
        logit_bias={1: 1.0},
        presence_penalty=1.0,
        stop_token_ids=[4],
    )
    processors = build_processors(params, [], [0], [lambda params, prompt: None])
    assert [type(processor).__name__ for processor in processors] == [
        "AllowedTokens",
        "BadWords",
        "MinTokens",
        "LogitBias",
        "Penalties",
    ]
    assert all(isinstance(processor, LogitsProcessor) for processor in processors)
    assert build_processors(SamplingParams(), [1], [0]) == []


def test_empty_bad_words_forbid_nothing():
    logits = row()
    BadWords([]).apply(logits)
    np.testing.assert_array_equal(logits, row())
