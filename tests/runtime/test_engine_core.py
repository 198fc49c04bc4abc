"""The engine core end to end on tiny models: whatever the batch, the chunks, the cache and the memory do, each answer
is what the request gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from core_driver import Driver, make_core, make_request, random_prompts, run_alone

SETTINGS = {
    "plain": {},
    "chunks of 7": {"max_prefill_chunk": 7},
    "chunks of 33": {"max_prefill_chunk": 33, "max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"num_blocks": 24},
    "preemption without prefix cache": {"num_blocks": 24, "enable_prefix_caching": False},
    "swap": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 1 << 20},
    "cached blocks swapped": {"num_blocks": 24, "swap_cached_blocks": True, "swap_space": 1 << 16},
    "everything swapped": {
        "num_blocks": 24,
        "swap_cached_blocks": True,
        "preemption_mode": "swap",
        "swap_space": 8192,
    },
    "swap space for a few blocks": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 8192},
    "static batching": {"batching": "static"},
    "priorities": {"scheduling_policy": "priority", "num_blocks": 30},
    "reserved from the start": {"max_preemptions": 0, "num_blocks": 40},
    "tpot slo": {"tpot_slo": 1e-6},
}


@pytest.mark.parametrize("model", ["hash", "tiny"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_answer_equals_the_request_alone(model: str, setting: str) -> None:
    """Case 11, and with the settings: chunked prefill, preemption, swap, prompts that arrive during decode."""
    prompts = random_prompts(12)
    prompts[5] = prompts[3][:17] + prompts[5]
    requests = [
        make_request(str(i), prompt, max_tokens=5 + 3 * i, priority=-i)
        if i % 3
        else make_request(str(i), prompt, greedy=False, max_tokens=5 + 3 * i, seed=i, temperature=0.8)
        for i, prompt in enumerate(prompts)
    ]
    driver = Driver(make_core(model=model, **SETTINGS[setting]))
    for request in requests[:7]:
        driver.add(request)
    for request in requests[7:]:
        driver.step()
        driver.step()
        driver.add(request)
    answers = driver.run()
    for request in requests:
        assert answers[request.request_id].tokens == run_alone(request, model=model).tokens
    if "preemption" in setting or "swap" in setting:
        assert driver.core.stats().preemptions > 0
    if setting == "reserved from the start":
        assert driver.core.stats().preemptions == 0
    if setting == "swap":
        stats = driver.core.stats()
        assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0
    pool = driver.core.kv.pool
    assert pool.num_used == 0


@pytest.mark.parametrize("model", ["hash", "tiny"])
def test_case_9_same_seed_same_text_whatever_else_runs(model: str) -> None:
    """Two concurrent requests with one seed: the same text; and the same as alone."""
    driver = Driver(make_core(model=model, num_blocks=40))
    sampled = {"greedy": False, "seed": 11, "temperature": 1.3, "max_tokens": 15, "ignore_eos": True}
    for name in "ab":
        driver.add(make_request(name, [3, 1, 4, 1, 5], **sampled))
        driver.add(make_request(f"noise {name}", [2, 7], greedy=False, seed=5, max_tokens=30))
    answers = driver.run()
    assert answers["a"].tokens == answers["b"].tokens
    assert answers["a"].tokens == run_alone(make_request("a", [3, 1, 4, 1, 5], **sampled), model=model).tokens


@pytest.mark.parametrize("model", ["hash", "tiny"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 16}, {"num_blocks": 16, "enable_prefix_caching": False}])
def test_n_sequences_of_one_prompt(model: str, options: dict) -> None:
    """Each of the n is what a request of one sequence with that index would draw; preemption restores all of them."""
    requests = [
        make_request(str(i), list(range(i, i + 6)), greedy=False, n=3, seed=i, temperature=1.2, max_tokens=14 + i)
        for i in range(4)
    ]
    driver = Driver(make_core(model=model, **options))
    for request in requests:
        driver.add(request)
        driver.step()
    answers = driver.run()
    for request in requests:
        answer = answers[request.request_id]
        assert answer.tokens == run_alone(request, model=model).tokens
        assert sorted(answer.finish_reasons) == [0, 1, 2]
        assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3
    if options:
        assert driver.core.stats().preemptions > 0


def test_best_of_runs_all_and_scores_them() -> None:
    driver = Driver(make_core())
    driver.add(make_request("r", [1, 2, 3], greedy=False, n=2, best_of=5, seed=1, max_tokens=6))
    answer = driver.run()["r"]
    assert sorted(answer.tokens) == [0, 1, 2, 3, 4]
    assert all(score is not None and score < 0 for score in answer.cumulative.values())


def test_prompt_shares_one_forward_pass() -> None:
    """n = 6: the prompt goes through the model once."""
    driver = Driver(make_core(max_num_batched_tokens=64))
    driver.add(make_request("r", list(range(40)), greedy=False, n=6, max_tokens=1))
    driver.run()
    assert driver.core.executor.steps == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [None, 3, 7])
def test_prompt_logprobs_are_those_of_the_model(chunk: int | None) -> None:
    """Position by position, with a warm prefix cache that has to be passed by."""
    prompt = [(7 * i) % 50 for i in range(23)]
    driver = Driver(make_core(max_prefill_chunk=chunk))
    driver.add(make_request("warm", prompt, max_tokens=2))
    driver.run()
    driver.add(make_request("r", prompt, max_tokens=3, prompt_logprobs=2, logprobs=1))
    answer = driver.run()["r"]
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 23
    assert answer.prompt_logprobs[0] is None
    model = driver.core.executor
    for position, scored in enumerate(answer.prompt_logprobs[1:], 1):
        logits = model.logits_after(prompt[:position]).astype(np.float64)  # type: ignore[attr-defined]
        expected = logits - np.log(np.exp(logits).sum())
        assert scored is not None
        assert scored.token_ids[0] == prompt[position]
        assert scored.token_ids[1:] == np.argsort(-expected)[:2].tolist()
        np.testing.assert_allclose(scored.logprobs, expected[scored.token_ids], atol=1e-5)
    assert [len(scored.token_ids) for scored in answer.logprobs[0]] == [2, 2, 2]
    assert answer.tokens == driver.answers["warm"].tokens | {0: answer.tokens[0]}
    assert answer.tokens[0][:2] == driver.answers["warm"].tokens[0]
    assert answer.deltas[0].num_cached_tokens == 0


def test_counters_add_up() -> None:
    driver = Driver(make_core(max_num_batched_tokens=64))
    for index in range(5):
        driver.add(make_request(str(index), [index] * 8, max_tokens=6, ignore_eos=True))
    driver.run()
    stats = driver.core.stats(with_blocks=True)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.requests_finished) == (40, 30, 5)
    assert stats.requests_in_slo == 5
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 100)
    assert stats.prefix_cache_queries == 40
    assert stats.peak_used_blocks == 5 * 4
    assert stats.num_cached_blocks == stats.block_states.count(1) > 0
    assert len(stats.block_states) == stats.num_blocks == 100
    assert driver.core.stats() == driver.core.stats()
    assert driver.core.reset_prefix_cache() == stats.num_cached_blocks
    assert driver.core.stats(with_blocks=True).block_states == bytes(100)


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_a_sibling_may_contain_all_of_the_first_sequence(chunk: int | None) -> None:
    """The first sequence ends at the edge of a block, and another goes on from there: neither loses a cell."""
    request = make_request("r", list(range(6)), greedy=False, n=2, max_tokens=12, ignore_eos=True)
    request.resume_token_ids = [[1, 2], [1, 2, 3, 4, 5]]
    driver = Driver(make_core(max_prefill_chunk=chunk, enable_prefix_caching=False))
    driver.add(request)
    assert driver.run()["r"].tokens == run_alone(request, block_size=64).tokens
