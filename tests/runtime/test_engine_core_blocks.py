"""Drafts that roll back, and sequences that wait for blocks, in the engine core."""

from __future__ import annotations

import numpy as np
import pytest
from core_driver import Driver, make_core, make_request, run_alone

from runtime.batch import build_batch


@pytest.mark.parametrize("model", ["hash", "tiny"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 16}])
def test_drafts_are_scheduled_with_their_rows_and_roll_back_by_length(model: str, options: dict) -> None:
    """What speculation needs of the core: drafts in the batch, a row each, `truncate`, and the same tokens after it."""
    requests = [make_request(str(i), [i, 7, i, 8, i], max_tokens=20, ignore_eos=True) for i in range(3)]
    driver = Driver(make_core(model=model, max_num_batched_tokens=12, **options))
    core, rng = driver.core, np.random.default_rng(0)
    for request in requests:
        core.add_request(request)
    produced: dict[str, list[int]] = {request.request_id: [] for request in requests}
    alone = {request.request_id: run_alone(request, model=model).tokens[0] for request in requests}
    while core.requests:
        for request in core.scheduler.running:
            (sequence,) = request.live
            if sequence.num_uncomputed == 1:
                room = request.max_total_tokens - 1 - len(sequence.tokens)
                truth = alone[request.request_id][sequence.num_output_tokens :]
                sequence.draft_token_ids = [t if rng.random() < 0.7 else (t + 1) % 50 for t in truth][: min(4, room)]
        step = core.scheduler.schedule()
        if not step.sequences:
            continue
        logits = core.executor.run(build_batch(step, core.kv.block_size))
        row = 0
        for part in step.sequences:
            sequence = part.sequence
            drafts = sequence.draft_token_ids[: max(0, part.num_tokens - 1)] if part.num_rows > 1 else []
            sequence.draft_token_ids = []
            sequence.tokens.extend(drafts)
            sequence.num_computed += part.num_tokens
            if not part.num_rows:
                continue
            accepted: list[int] = []
            for draft in [*drafts, None]:
                accepted.append(int(logits[row + len(accepted)].argmax()))
                if accepted[-1] != draft:
                    break
            row += part.num_rows
            core.kv.truncate(sequence, len(sequence.tokens) - len(drafts) + len(accepted) - 1)
            core.kv.advance(sequence, 0)
            sequence.tokens.append(accepted[-1])
            produced[sequence.request.request_id] += accepted
            if len(sequence.tokens) >= sequence.request.max_total_tokens:
                core.scheduler.finish_sequence(sequence)
                del core.requests[sequence.request.request_id]
        core.check()
    assert produced == alone


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_resumed_sequences_that_have_not_begun_never_wait_for_blocks_that_cannot_be(mode: str) -> None:
    """Each of them needs its own copy of a block that ends with the prompt. Found by a fuzzer: it waited for ever."""
    options = {"block_size": 1, "preemption_mode": mode, "swap_space": 1 << 16, "enable_prefix_caching": False}
    message = make_request("r", [3], greedy=False, n=8, max_tokens=2, ignore_eos=True, resume_token_ids=[[1], [2]])
    driver = Driver(make_core(10, **options))
    driver.add(message)
    answer = driver.run(100)["r"]
    assert answer.error_kind == "request"
    assert "16 KV blocks" in (answer.error or "")
    driver = Driver(make_core(16, **options))
    driver.add(message)
    driver.add(make_request("other", [5], max_tokens=9, ignore_eos=True))
    answers = driver.run(200)
    assert answers["r"].error is None
    assert set(answers["r"].tokens) == set(range(8))
