"""The sampler against the definition of each parameter, written out in f64; cases 9 and 11."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from plugins.sampling.reference import distribution, pick
from runtime.errors import RequestError
from runtime.philox import uniform
from runtime.sampler import Sampler
from runtime.sampling.narrow import MAX_CANDIDATES
from runtime.sampling.rows import ChunkedExp
from runtime.sampling.selection import Restriction, candidates
from runtime.sampling_params import SamplingParams

EOS = 0


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def by_definition(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that `params` describe, f64 [V]: plain sorting, plain softmax, vLLM's order."""
    x = logits.astype(np.float64) / params.temperature
    if params.min_p > 0:
        p = softmax(x)
        x = np.where(p >= params.min_p * p.max() * (1 - 1e-6), x, -np.inf)
    if 0 < params.top_k < x.size:
        x = np.where(x >= np.sort(x)[-params.top_k], x, -np.inf)
    if params.top_p < 1:
        p = softmax(x)
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        keep = order[before < params.top_p]
        mask = np.full(x.size, -np.inf)
        mask[keep] = 0
        x = x + mask
    if params.typical_p < 1:
        p = softmax(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            entropy = np.nansum(p * surprise)
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        order = order[p[order] > 0]
        before = np.cumsum(p[order]) - p[order]
        mask = np.full(x.size, -np.inf)
        mask[order[before < params.typical_p]] = 0
        x = x + mask
    return softmax(x)


RESTRICTIONS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k larger than half the chunks": {"top_k": 90},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "top_p nearly all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.7},
    "top_k and top_p": {"top_k": 30, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.9},
    "min_p and top_k": {"min_p": 0.02, "top_k": 12},
    "all": {"temperature": 0.7, "min_p": 0.01, "top_k": 40, "top_p": 0.9, "typical_p": 0.9},
    "top_p hot": {"temperature": 3.0, "top_p": 0.95},
    "top_k and typical_p": {"top_k": 50, "typical_p": 0.5},
}


@pytest.mark.parametrize("vocab_size", [3, 64, 200, 4096, 5003])
@pytest.mark.parametrize("name", RESTRICTIONS)
def test_distribution_is_that_of_the_definition(name, vocab_size):
    params = SamplingParams(seed=1, **RESTRICTIONS[name])
    sampler = Sampler(vocab_size, [EOS])
    state = sampler.new_state(params, [1])
    rng = np.random.default_rng(vocab_size)
    for scale in (0.3, 3.0, 30.0):
        row = (rng.standard_normal(vocab_size) * scale).astype(np.float32)
        row[rng.random(vocab_size) < 0.1] = -np.inf
        row[vocab_size // 2] = 0.5
        expected = by_definition(row, params)
        ids, probabilities = sampler.distribution(row, state)
        got = np.zeros(vocab_size)
        got[ids] = probabilities
        # A set may differ by one token of next to no weight where a sum of f32 falls on the other side of the edge.
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-4)
        if params.top_p == 1.0:
            assert set(ids) == set(np.flatnonzero(expected > 0))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_distribution_on_ties_and_extremes(data):
    vocab_size = data.draw(st.integers(1, 300))
    values = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, 1e4, -1e4, 80.0, 88.5, -90.0, float("-inf")])
    row = np.array(data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)), np.float32)
    row[data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from([0.0, 90.0, -90.0]))
    params = SamplingParams(
        seed=1,
        temperature=data.draw(st.sampled_from([1.0, 0.01, 0.5, 1.7, 100.0, 1e-5])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 5, 40, 200])),
        top_p=data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.1])),
        min_p=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    sampler = Sampler(vocab_size, [EOS])
    state = sampler.new_state(params, [1])
    full = by_definition(row, msgspec.structs.replace(params, top_p=1.0))
    ids, probabilities = sampler.distribution(row, state)
    got = np.zeros(vocab_size)
    got[ids] = probabilities
    # The fewest likeliest tokens that reach top_p (at an exact tie of the mass, one more or less), renormalised.
    kept = np.zeros(vocab_size)
    kept[ids] = full[ids]
    assert full[ids].min() >= np.delete(full, ids).max(initial=0.0)
    assert kept.sum() >= params.top_p - 1e-5
    assert kept.sum() - full[ids].min() < params.top_p + 1e-5
    np.testing.assert_allclose(got, kept / kept.sum(), atol=1e-6)
    token_id = sampler.sample(row[None], [state])[0].token_id
    assert got[token_id] > 0


def draws(params: dict, row: np.ndarray, count: int, *, prompt=(1,), output=()) -> np.ndarray:
    """Token counts of `count` draws: rows of one batch, several positions each."""
    sampler = Sampler(row.size, [EOS])
    states = [sampler.new_state(SamplingParams(seed=seed, **params), prompt, 0, output) for seed in range(50)]
    logits = np.repeat(row[None], 50, axis=0)
    counts = np.zeros(row.size, np.int64)
    for _ in range(count // 50):
        for state, sampled in zip(states, sampler.sample(logits, states), strict=True):
            counts[sampled.token_id] += 1
            state.output_token_ids.append(sampled.token_id)  # a new position; the processors stay as they are
    return counts


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, tokens of small expectation pooled. The draws are fixed by their seeds, so this cannot flake."""
    assert not counts[expected == 0].any(), "a forbidden token was drawn"
    expected = expected * counts.sum()
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    large = int((expected >= 8).sum())
    pooled_counts = np.append(counts[:large], counts[large:].sum())
    pooled = np.append(expected[:large], expected[large:].sum())
    keep = pooled > 1e-9
    if keep.sum() > 1:
        assert stats.chisquare(pooled_counts[keep], pooled[keep] * counts.sum() / pooled[keep].sum()).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [150, 1200])
@pytest.mark.parametrize("name", [name for name in RESTRICTIONS if "tiny" not in name])
def test_draws_follow_the_distribution(name, vocab_size):
    row = (np.random.default_rng(5).standard_normal(vocab_size) * 2).astype(np.float32)
    counts = draws(RESTRICTIONS[name], row, 6_000)
    assert_drawn_from(counts, by_definition(row, SamplingParams(**RESTRICTIONS[name])))


def test_draws_from_more_candidates_than_are_finished_together():
    row = (np.random.default_rng(6).standard_normal(1000) * 0.5).astype(np.float32)
    for options in ({"top_p": 0.9}, {"top_k": 400}, {"min_p": 0.01}, {"top_k": 500, "top_p": 0.8, "typical_p": 0.9}):
        expected = by_definition(row, SamplingParams(**options))
        assert (expected > 0).sum() > MAX_CANDIDATES
        assert_drawn_from(draws(options, row, 10_000), expected)


PROMPT, OUTPUT = [1, 2, 2, 30, 31], [5, 40, 40, 40, 5, 8]


def penalized(x: np.ndarray, repetition=1.0, frequency=0.0, presence=0.0) -> np.ndarray:
    """The penalties as the CTRL paper and the OpenAI API define them, for `PROMPT` and `OUTPUT`."""
    x = x.copy()
    for token_id in {*PROMPT, *OUTPUT}:
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
    for token_id in set(OUTPUT):
        x[token_id] -= frequency * OUTPUT.count(token_id) + presence
    return x


def without(x: np.ndarray, *token_ids: int) -> np.ndarray:
    return np.where(np.isin(np.arange(x.size), token_ids), -np.inf, x)


def biased(x: np.ndarray, bias: dict[int, float]) -> np.ndarray:
    return x + np.array([bias.get(i, 0.0) for i in range(x.size)])


PROCESSORS = {
    "repetition": ({"repetition_penalty": 1.8}, lambda x: penalized(x, 1.8)),
    "frequency": ({"frequency_penalty": 0.7}, lambda x: penalized(x, 1.0, 0.7)),
    "presence": ({"presence_penalty": -1.2}, lambda x: penalized(x, 1.0, 0.0, -1.2)),
    "all penalties": (
        {"repetition_penalty": 0.8, "frequency_penalty": 0.3, "presence_penalty": 0.5},
        lambda x: penalized(x, 0.8, 0.3, 0.5),
    ),
    "logit_bias": ({"logit_bias": {3: 2.0, 9: -100.0}}, lambda x: biased(x, {3: 2.0, 9: -100.0})),
    "allowed": ({"allowed_token_ids": [2, 3, 50]}, lambda x: without(x, *(set(range(x.size)) - {2, 3, 50}))),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": [7]}, lambda x: without(x, EOS, 7)),
    "min_tokens reached": ({"min_tokens": 6, "stop_token_ids": [7]}, lambda x: x),
    # The output ends with 5, 8: so 10 is forbidden, and 11 is not.
    "bad_words": ({"bad_words_token_ids": [[4], [6, 8], [5, 8, 10], [6, 11]]}, lambda x: without(x, 4, 10)),
    "bias after bans": (
        {"allowed_token_ids": [2, 5, 9], "logit_bias": {5: 1.0, 7: 90.0}, "frequency_penalty": 0.5},
        lambda x: penalized(biased(without(x, *(set(range(x.size)) - {2, 5, 9})), {5: 1.0, 7: 90.0}), frequency=0.5),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("restriction", [{}, {"temperature": 0.8, "top_k": 30, "top_p": 0.9}])
def test_draws_with_each_processor(name, restriction):
    options, formula = PROCESSORS[name]
    row = (np.random.default_rng(7).standard_normal(120) * 2).astype(np.float32)
    expected = by_definition(formula(row.astype(np.float64)), SamplingParams(**restriction))
    assert_drawn_from(draws({**options, **restriction}, row, 8_000, prompt=PROMPT, output=OUTPUT), expected)


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    choose = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    return SamplingParams(
        seed=int(rng.integers(2**63)),
        temperature=choose(0.0, 0.7, 1.0, 1.5),
        top_k=choose(0, 0, 5, 50, 300),
        top_p=choose(1.0, 0.9, 0.5),
        min_p=choose(0.0, 0.0, 0.05),
        typical_p=choose(1.0, 1.0, 0.8),
        repetition_penalty=choose(1.0, 1.0, 1.3),
        presence_penalty=choose(0.0, 0.5),
        logit_bias=choose(None, {int(rng.integers(vocab_size)): 3.0}),
        min_tokens=choose(0, 4),
        logprobs=choose(None, 0, 3),
        bad_words_token_ids=choose(None, [[3], [4, 5]]),
    )


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_case_9_same_text_alone_in_any_batch_and_after_a_preemption(vocab_size):
    rng = np.random.default_rng(11)
    requests = [random_params(rng, vocab_size) for _ in range(24)]
    logits = (rng.standard_normal((6, len(requests), vocab_size)) * 2).astype(np.float32)

    def run(order, preempt=False):
        """Six steps of the requests in that order, as one batch."""
        sampler = Sampler(vocab_size, [EOS])
        states = {i: sampler.new_state(requests[i], [1, 2]) for i in order}
        results = {i: [] for i in order}
        for step in range(6):
            if preempt and step == 3:  # every state is lost and rebuilt from the tokens
                states = {i: sampler.new_state(requests[i], [1, 2], 0, s.output_token_ids) for i, s in states.items()}
            sampled = sampler.sample(logits[step][order], [states[i] for i in order])
            for i, token in zip(order, sampled, strict=True):
                results[i].append((token.token_id, token.logprob, token.logprobs))
                states[i].append(token.token_id)
        return results

    together = run(list(range(24)))
    assert run(list(range(23, -1, -1))) == together
    assert run(list(range(24)), preempt=True) == together
    for i in range(24):
        assert run([i])[i] == together[i]


def test_same_seed_same_text_and_other_sequences_differ():
    sampler = Sampler(500, [EOS])
    row = np.zeros((1, 500), np.float32)
    params = SamplingParams(seed=3, n=3)

    def text(state):
        for _ in range(20):
            state.append(sampler.sample(row, [state])[0].token_id)
        return state.output_token_ids

    first = text(sampler.new_state(params, [1], 0))
    assert text(sampler.new_state(params, [9, 9], 0)) == first
    assert text(sampler.new_state(params, [1], 0).fork(0)) == first
    second = text(sampler.new_state(params, [1], 1))
    assert second != first
    assert text(sampler.new_state(params, [1], 0).fork(1)) == second
    assert text(sampler.new_state(SamplingParams(seed=4), [1], 0)) != first


def test_unseeded_requests_differ_and_forks_of_them_too():
    sampler = Sampler(500, [EOS])
    row = np.zeros((2, 500), np.float32)
    parent = sampler.new_state(SamplingParams(), [1])
    for pair in ([parent, parent.fork(1)], [sampler.new_state(SamplingParams(), [1]) for _ in range(2)]):
        for _ in range(8):
            for state, token in zip(pair, sampler.sample(row, pair), strict=True):
                state.append(token.token_id)
        assert pair[0].output_token_ids != pair[1].output_token_ids


def test_negative_and_large_seeds():
    sampler = Sampler(100, [EOS])
    row = np.zeros((1, 100), np.float32)
    for seed in (-(2**63), -2, 0, 2**63, 2**64 - 1):
        assert sampler.sample(row, [sampler.new_state(SamplingParams(seed=seed), [1])])[0].error is None


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_greedy_takes_the_lowest_id_among_equals(temperature):
    row = np.array([[0.0, 2.0, 1.0, 2.0]], np.float32)
    sampler = Sampler(4, [EOS])
    state = sampler.new_state(SamplingParams(temperature=temperature, top_k=3, top_p=0.1), [1])
    assert sampler.sample(row, [state])[0].token_id == 1


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"typical_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30, 1e300])
def test_extreme_temperatures_and_logits(options, temperature):
    sampler = Sampler(200, [EOS])
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1.0, 1e4, 3e37):
        row = (rng.standard_normal((1, 200)) * scale).clip(-3e38, 3e38).astype(np.float32)
        state = sampler.new_state(SamplingParams(seed=1, temperature=temperature, **options), [1])
        with np.errstate(all="raise", under="ignore", over="ignore"):
            sampled = sampler.sample(row, [state])[0]
        assert sampled.error is None
        if temperature <= 1e-3 and scale >= 1:
            assert sampled.token_id == row.argmax()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"typical_p": 0.5}])
def test_broken_logits_end_their_row_alone(bad, options):
    sampler = Sampler(100, [EOS])
    logits = np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32)
    logits[1, 60] = bad
    states = [sampler.new_state(SamplingParams(seed=1, logprobs=1, **options), [1]) for _ in range(3)]
    first, broken, last = sampler.sample(logits, states)
    assert "not finite" in broken.error
    assert first.error is None
    assert last.error is None
    logits[1] = -np.inf
    assert "not finite" in sampler.sample(logits, states)[1].error


def test_nothing_left_to_sample():
    sampler = Sampler(10, [EOS])
    state = sampler.new_state(SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3]]), [1])
    sampled = sampler.sample(np.zeros((1, 10), np.float32), [state])[0]
    assert "forbid the whole vocabulary" in sampled.error
    with pytest.raises(RequestError, match="forbid the whole vocabulary"):
        sampler.distribution(np.zeros(10, np.float32), state)


def test_logits_stay_as_they_are_and_may_be_read_only():
    sampler = Sampler(80, [EOS])
    logits = np.random.default_rng(0).standard_normal((2, 80)).astype(np.float32)
    before = logits.copy()
    logits.setflags(write=False)
    states = [
        sampler.new_state(SamplingParams(seed=1, repetition_penalty=2.0, min_tokens=3, logit_bias={1: 5.0}), [1]),
        sampler.new_state(SamplingParams(temperature=0.0, allowed_token_ids=[5]), [1]),
    ]
    assert sampler.sample(logits, states)[1].token_id == 5
    np.testing.assert_array_equal(logits, before)


def test_rows_that_are_no_contiguous_array():
    sampler = Sampler(80, [EOS])
    wide = np.random.default_rng(0).standard_normal((2, 160)).astype(np.float32)
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"logprobs": 2}):
        state = sampler.new_state(SamplingParams(seed=1, **options), [1])
        strided = sampler.sample(wide[:1, ::2], [state])[0]
        assert strided == sampler.sample(np.ascontiguousarray(wide[:1, ::2]), [state])[0]


def test_empty_batch():
    assert Sampler(10, [EOS]).sample(np.zeros((0, 10), np.float32), []) == []


class Shout:
    """Allows even tokens only, and counts what it is told."""

    def __init__(self):
        self.told = []

    def apply(self, logits):
        logits[1::2] = -np.inf

    def append(self, token_id):
        self.told.append(token_id)

    def rewind(self, token_ids):
        del self.told[-len(token_ids) :]

    def fork(self):
        copy = Shout()
        copy.told = self.told.copy()
        return copy


def test_a_processor_of_ones_own():
    def make(params, prompt_token_ids):
        return Shout() if (params.extra_args or {}).get("shout") else None

    sampler = Sampler(100, [EOS], logits_processors=[make])
    loud = sampler.new_state(SamplingParams(seed=1, extra_args={"shout": True}), [1])
    plain = sampler.new_state(SamplingParams(seed=1), [1])
    assert plain.processors == []
    for _ in range(20):
        loud.append(sampler.sample(np.zeros((1, 100), np.float32), [loud])[0].token_id)
    assert all(token % 2 == 0 for token in loud.output_token_ids)
    loud.truncate(5)
    assert loud.processors[0].told == loud.output_token_ids
    assert len(loud.output_token_ids) == 5


def test_best_of_asks_for_log_probabilities():
    sampler = Sampler(50, [EOS])
    row = np.random.default_rng(0).standard_normal((1, 50)).astype(np.float32)
    state = sampler.new_state(SamplingParams(seed=1, n=1, best_of=2), [1])
    sampled = sampler.sample(row, [state])[0]
    assert sampled.logprobs is None
    assert sampled.logprob == pytest.approx(
        float(np.log(softmax(row[0].astype(np.float64)))[sampled.token_id]), abs=1e-5
    )
    state.append(sampled.token_id, sampled.logprob)
    state.append(sampled.token_id, sampled.logprob)
    assert state.cumulative_logprob == pytest.approx(2 * sampled.logprob)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_truncate_leads_back_to_the_same_state(data):
    """Drafted tokens that are taken back leave no trace: the edited logits are those of a state that never saw them."""
    params = SamplingParams(
        seed=1,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        min_tokens=4,
        bad_words_token_ids=[[1, 2], [2, 2, 3], [5]],
        logit_bias={3: 1.0},
    )
    sampler = Sampler(12, [EOS])
    prompt = [7, 8]
    state = sampler.new_state(params, prompt)
    token = st.integers(0, 11)
    for _ in range(data.draw(st.integers(1, 4))):
        for token_id in data.draw(st.lists(token, max_size=6)):
            state.append(token_id)
        state.truncate(data.draw(st.integers(0, len(state.output_token_ids))))
        fork = state.fork(0)
    row = np.linspace(-2, 2, 12, dtype=np.float32)
    fresh = sampler.new_state(params, prompt, 0, state.output_token_ids)
    expected = sampler.processed(row, fresh).copy()
    np.testing.assert_array_equal(sampler.processed(row, state), expected)
    np.testing.assert_array_equal(sampler.processed(row, fork), expected)
    assert fork.uniform() == fresh.uniform() == state.uniform()


def test_the_counter_is_the_output_position():
    """What a seed means must not change between versions: key (seed, index), counter the position."""
    sampler = Sampler(50, [EOS])
    state = sampler.new_state(SamplingParams(seed=7, n=3), [1], 2)
    for position in range(70):  # over the edges of the blocks in which numbers are drawn
        assert state.uniform() == uniform(7, 2, position)
        state.append(1)
    state.truncate(3)
    assert state.uniform() == uniform(7, 2, 3)


def test_the_token_hangs_on_what_may_be_sampled_and_not_on_how_it_was_found() -> None:
    """Rows that leave at most 128 tokens are added up from the likeliest down, also where the search for those looked
    at more; rows that leave more by their ids. Whoever samples elsewhere (a GPU) needs to know no more than that."""
    rng = np.random.default_rng(2)
    seen = set()
    sampler = Sampler(3000, ())
    for seed in range(40):
        row = (rng.standard_normal(3000) * 2).astype(np.float32)
        params = SamplingParams(temperature=3.0, top_k=110 + seed, seed=seed)
        restriction = Restriction.of(params)
        found = candidates(row, ChunkedExp(3000), restriction)
        probabilities = distribution(row, restriction.temperature, params.top_k)
        left = np.count_nonzero(probabilities)
        ids = np.flatnonzero(probabilities)
        (token,) = sampler.sample(row[None], [sampler.new_state(params, [1])])
        u = uniform(seed, 0, 0)
        ascending = int(ids[np.searchsorted(np.cumsum(probabilities[ids]), u, side="right")])
        assert token.token_id == (pick(probabilities, u) if left <= MAX_CANDIDATES else ascending)
        seen.add((found.ids.size > MAX_CANDIDATES, bool(left > MAX_CANDIDATES)))
    assert seen >= {(True, False), (True, True)}
