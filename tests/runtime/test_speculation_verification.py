"""Speculative sampling keeps the target's distribution: chi-square tests over known distributions, and exact ones."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from core_driver import Driver, make_request
from drafters import ANY_DRAFTS, DrawnFromTable, PartlyRight
from scipy.stats import chisquare
from tiny_model import HashModelExecutor

from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.executor import StepBatch
from runtime.sampler import Sampler
from runtime.sampling_params import SamplingParams
from runtime.speculation.draft_engine import DraftEngine

V, LENGTH, REQUESTS = 5, 4, 1500


class TableExecutor(HashModelExecutor):
    """The logits of the next token depend on the last one alone: a known distribution at every position."""

    def __init__(self, logits: np.ndarray):
        super().__init__(len(logits), num_blocks=600)
        self.table = logits.astype(np.float32)

    def run(self, batch: StepBatch) -> np.ndarray:
        return self.table[batch.token_ids[batch.logits_rows]]


def tables(sharpness: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """The target's logits [V, V], and the draft's probabilities [V, V], which are something else."""
    rng = np.random.default_rng(3)
    draft = np.exp(rng.standard_normal((V, V)) * 1.2)
    draft[:, 0] = 0.0  # what the draft never says must come all the same
    return rng.standard_normal((V, V)) * sharpness, draft / draft.sum(axis=1, keepdims=True)


def outputs(params: dict[str, Any], drafter: Any) -> list[tuple[int, ...]]:
    config = EngineConfig(max_context_len=64, max_num_seqs=64, max_num_batched_tokens=512, speculation=ANY_DRAFTS)
    core = EngineCore(TableExecutor(tables()[0]), config, draft_engine=drafter)
    driver = Driver(core)
    for i in range(REQUESTS):
        driver.add(make_request(f"r{i}", [1], greedy=False, seed=i, max_tokens=LENGTH, **params))
    while core.has_work():
        for delta in core.step().deltas:
            driver.answers[delta.request_id].take(delta)
    assert core.stats().spec_decode_num_accepted_tokens > REQUESTS / 10
    return [tuple(answer.tokens[0]) for answer in driver.answers.values()]


def expected(params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each whole output, from the sampler's own distribution after each prefix."""
    logits = tables()[0].astype(np.float32)
    sampler = Sampler(V, ())
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, chance in chances.items():
            state = sampler.new_state(SamplingParams(seed=0, **params), [1], 0, prefix)
            ids, p = sampler.distribution(logits[([1, *prefix])[-1]], state)
            for token_id, share in zip(ids.tolist(), p.tolist(), strict=True):
                longer[(*prefix, token_id)] = chance * share
        chances = longer
    return chances


PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.5, "temperature": 0.8, "top_p": 0.9},
    {"logit_bias": {2: 1.5}, "allowed_token_ids": [0, 2, 3, 4]},
]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        *(("drawn", params) for params in PARAMS[:4]),
        *(("draft engine", params) for params in PARAMS[1:]),
        ("certain", {"temperature": 0.8}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_the_distribution_is_the_targets(kind: str, params: dict[str, Any]) -> None:
    """Chi-square of each position's tokens, and of whole outputs, where the draft's distribution is another."""
    table = tables()[1]
    if kind == "drawn":
        drafter: Any = DrawnFromTable(table)
    elif kind == "draft engine":  # of other logits, under the same parameters
        executor = TableExecutor(np.random.default_rng(4).standard_normal((V, V)))
        drafter = DraftEngine(executor, Sampler(V, ()), max_num_batched_tokens=512, max_context_len=64, drawn=True)
    else:  # its argmax, again and again: point masses
        point = np.zeros_like(table)
        point[np.arange(V), table.argmax(axis=1)] = 1.0
        drafter = DrawnFromTable(point)
    got = outputs(params, drafter)
    chances = expected(params)
    assert set(got) <= set(chances), "a token came that may not be sampled"
    for position in range(LENGTH):
        share: dict[Any, float] = defaultdict(float)
        for output, chance in chances.items():
            share[output[position]] += chance
        check(Counter(output[position] for output in got), share)
    check(Counter(got), dict(chances))


def check(counts: Counter[Any], chances: dict[Any, float]) -> None:
    """Chi-square at 1e-4 over all outcomes that are expected five times or more; the others are one."""
    keys = [key for key, chance in chances.items() if chance * REQUESTS >= 5]
    observed = [counts[key] for key in keys]
    wanted = [chances[key] * REQUESTS for key in keys]
    if (rest := REQUESTS - sum(wanted)) > 1:
        observed.append(REQUESTS - sum(observed))
        wanted.append(rest)
    if len(wanted) > 1:
        assert chisquare(observed, np.array(wanted) * REQUESTS / sum(wanted)).pvalue > 1e-4


def test_a_wrong_rule_would_be_seen() -> None:
    """The test has the power to tell: drafts accepted whatever the target says fail it."""
    chances: dict[Any, float] = defaultdict(float)
    for output, chance in expected({}).items():
        chances[output[0]] += chance
    rng = np.random.default_rng(0)
    draws = rng.choice(V, REQUESTS, p=tables()[1][1])
    with pytest.raises(AssertionError):
        check(Counter(draws.tolist()), chances)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 0.9}, {"top_p": 0.8, "presence_penalty": 0.5}, {"n": 3, "temperature": 1.0}],
    ids=str,
)
def test_certain_drafts_change_no_token(params: dict[str, Any]) -> None:
    """A seed's text is the same with drafts, without them, and with other drafts (cases 9 and 25)."""
    texts = []
    for drafter in (None, PartlyRight(lambda s: [1] * 30, V, seed=1), PartlyRight(lambda s: [2, 3] * 15, V, seed=2)):
        config = EngineConfig(max_context_len=64, max_num_seqs=16, max_num_batched_tokens=64)
        if drafter is not None:
            config = EngineConfig(
                max_context_len=64, max_num_seqs=16, max_num_batched_tokens=64, speculation=ANY_DRAFTS
            )
        driver = Driver(EngineCore(TableExecutor(tables()[0]), config, draft_engine=drafter))
        for i in range(5):
            driver.add(make_request(f"r{i}", [i % V], greedy=False, max_tokens=25, **{"seed": i} | params))
        texts.append({key: answer.tokens for key, answer in driver.run().items()})
    assert texts[0] == texts[1] == texts[2]


def test_logprobs_of_accepted_tokens() -> None:
    """Every token comes with the log probabilities of its own position, and the sums agree."""
    logits = tables()[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for drafter in (PartlyRight(lambda s: [1, 2] * 20, V), DrawnFromTable(tables()[1])):
        config = EngineConfig(max_context_len=64, max_num_seqs=4, max_num_batched_tokens=64, speculation=ANY_DRAFTS)
        driver = Driver(EngineCore(TableExecutor(logits), config, draft_engine=drafter))
        driver.add(make_request("r", [1], greedy=False, seed=5, max_tokens=30, logprobs=2))
        answer = driver.run()["r"]
        tokens = answer.tokens[0]
        assert len(answer.logprobs[0]) == len(tokens) == 30
        total = 0.0
        for before, token_id, entry in zip([1, *tokens], tokens, answer.logprobs[0], strict=False):
            assert entry.token_ids[0] == token_id
            np.testing.assert_allclose(entry.logprobs[0], logprobs[before, token_id], atol=1e-4)
            total += logprobs[before, token_id]
        np.testing.assert_allclose(answer.cumulative[0], total, atol=1e-3)


def test_an_end_within_a_draft_ends_there() -> None:
    """A stop token that was drafted and accepted: nothing after it is told; min_tokens forbids it before."""
    logits = np.full((V, V), -10.0)
    for token_id, following in enumerate([1, 2, 3, 4, 0]):
        logits[token_id, following] = 10.0
    cycle = list(itertools.islice(itertools.cycle([1, 2, 3, 4, 0]), 30))
    config = EngineConfig(max_context_len=64, max_num_seqs=4, max_num_batched_tokens=64, speculation=ANY_DRAFTS)
    drafter = PartlyRight(lambda s: cycle, V, right=1.0, seed=3)
    driver = Driver(EngineCore(TableExecutor(logits), config, draft_engine=drafter))
    driver.add(make_request("stop", [0], max_tokens=30, stop_token_ids=[4]))
    driver.add(make_request("length", [0], max_tokens=7))
    driver.add(make_request("later", [0], max_tokens=30, stop_token_ids=[2], min_tokens=6))
    answers = driver.run()
    assert answers["stop"].tokens[0] == [1, 2, 3, 4]
    assert answers["stop"].stop_reasons[0] == 4
    assert answers["length"].tokens[0] == cycle[:7]
    assert answers["length"].finish_reasons[0] == "length"
    later = answers["later"].tokens[0]
    assert 2 not in later[:6]
    assert later[-1] == 2
