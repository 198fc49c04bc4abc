"""Log probabilities equal a log-softmax of the engine's logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.logprobs import RowLogprobs, prompt_logprobs
from runtime.sampler import Sampler
from runtime.sampling.rows import ChunkedExp
from runtime.sampling_params import SamplingParams


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.sampled_from([0.01, 1.0, 5.0, 60.0, 3000.0]), st.floats(-200, 200), st.integers(0, 1000))
def test_equals_log_softmax(vocab_size, scale, shift, seed):
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(vocab_size) * scale + shift).astype(np.float32)
    token_id = int(rng.integers(vocab_size))
    num_top = int(rng.integers(0, 30))
    got = RowLogprobs(row, ChunkedExp(vocab_size)).gather(token_id, num_top)
    expected = log_softmax(row)
    np.testing.assert_allclose(got.logprobs, expected[got.token_ids], atol=2e-5, rtol=1e-6)
    top = np.argsort(-row, kind="stable")[:num_top]
    assert got.token_ids == [token_id, *top]
    assert got.ranks == [1 + int((row > row[token_id]).sum()), *range(1, len(top) + 1)]


def test_ties_and_ranks():
    row = np.array([1.0, 3.0, 3.0, 2.0, 3.0], np.float32)
    got = RowLogprobs(row, ChunkedExp(5)).gather(3, 2)
    assert got.token_ids == [3, 1, 2]
    assert got.ranks == [4, 1, 2]
    assert RowLogprobs(row, ChunkedExp(5)).gather(4, 2).ranks == [1, 1, 2]


def test_whole_vocabulary():
    row = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    got = RowLogprobs(row, ChunkedExp(300)).gather(7, -1)
    assert got.token_ids[0] == 7
    assert sorted(got.token_ids[1:]) == list(range(300))
    assert np.exp(got.logprobs[1:]).sum() == pytest.approx(1.0, abs=1e-5)
    assert got.logprobs[1:] == sorted(got.logprobs[1:], reverse=True)


def test_prompt_logprobs_score_the_next_token():
    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    entries = prompt_logprobs(logits, [3, 1, 4, 1], 2)
    for row, token_id, entry in zip(logits, [3, 1, 4, 1], entries, strict=True):
        assert entry.token_ids[0] == token_id
        np.testing.assert_allclose(entry.logprobs, log_softmax(row)[entry.token_ids], atol=1e-5)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}])
def test_before_temperature_masks_and_penalties(options):
    sampler = Sampler(50, [0])
    logits = np.random.default_rng(0).standard_normal((1, 50)).astype(np.float32)
    params = SamplingParams(
        seed=1,
        logprobs=4,
        repetition_penalty=3.0,
        logit_bias={5: 9.0},
        min_tokens=3,
        allowed_token_ids=[5, 6],
        **options,
    )
    sampled = sampler.sample(logits, [sampler.new_state(params, [5])])[0]
    assert sampled.logprobs.token_ids[0] == sampled.token_id
    np.testing.assert_allclose(sampled.logprobs.logprobs, log_softmax(logits[0])[sampled.logprobs.token_ids], atol=1e-5)
    assert sampled.logprob == sampled.logprobs.logprobs[0]


def test_zero_means_the_sampled_token_alone():
    sampler = Sampler(50, [0])
    logits = np.random.default_rng(0).standard_normal((1, 50)).astype(np.float32)
    sampled = sampler.sample(logits, [sampler.new_state(SamplingParams(seed=1, logprobs=0), [5])])[0]
    assert sampled.logprobs.token_ids == [sampled.token_id]
    assert len(sampled.logprobs.ranks) == 1
