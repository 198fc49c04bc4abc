"""Whole runs with a drafting engine, and what a target may do meanwhile."""

from __future__ import annotations

from typing import Any

from core_driver import Driver, make_core, make_request, run_alone

# What a target may do while drafts are made for it.
TARGET_OPTIONS: list[dict[str, Any]] = [
    {"num_blocks": 14, "max_num_batched_tokens": 12},  # preemption
    {"num_blocks": 14, "preemption_mode": "swap"},
    {"max_prefill_chunk": 2, "max_num_batched_tokens": 10},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority", "num_blocks": 14},
]
DRAFTED_REQUESTS = [make_request(f"r{i}", [i, *range(3 * i)], max_tokens=30) for i in range(5)]


def drive_drafts(requests: list[Any], drafter: Any, **options: Any) -> Driver:
    """Run requests with a drafting engine; every answer must be that of the request alone, and no block stay taken."""
    driver = Driver(make_core(drafter=drafter, **options))
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        assert driver.answers[request.request_id].tokens == run_alone(request).tokens
    assert drafter.kv.pool.num_used == 0
    return driver


def draft_figures(driver: Driver) -> tuple[int, int]:
    """Drafted tokens, and accepted ones."""
    stats = driver.core.stats()
    return stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
