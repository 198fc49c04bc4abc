"""The engine core end to end on tiny models: whatever the batch, the chunks, the cache and the memory do, each answer
is what the request gets alone."""

from __future__ import annotations

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
