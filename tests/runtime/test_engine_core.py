"""The engine core end to end on tiny models: whatever the batch, the chunks, the cache and the memory do, each answer
is what the request gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from core_driver import Driver, make_core, make_request, random_prompts, run_alone

from runtime.batch import build_batch
from runtime.beam import BeamSearch, Hypothesis
from runtime.executor import StepBatch
from runtime.messages import EngineRequest

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


def test_stop_tokens_and_eos() -> None:
    free = run_alone(make_request("r", [5, 6], max_tokens=20))
    tokens = free.tokens[0]
    eos, stop = tokens[9], tokens[4]
    first_eos, first_stop = tokens.index(eos), tokens.index(stop)
    for options, expected, reason in (
        ({}, tokens[: first_eos + 1], ("stop", None)),
        ({"ignore_eos": True}, tokens, ("length", None)),
        ({"stop_token_ids": [stop]}, tokens[: first_stop + 1], ("stop", stop)),
    ):
        answer = run_alone(make_request("r", [5, 6], max_tokens=20, **options), eos_token_ids=(eos,))
        assert answer.tokens == {0: expected}
        assert (answer.finish_reasons[0], answer.stop_reasons[0]) == reason


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "decoding", "preempted", "swapped out"])
def test_case_13_abort_frees_everything_at_once(when: str) -> None:
    options: dict = {"max_prefill_chunk": 4}
    if when in ("preempted", "swapped out"):
        options |= {"num_blocks": 12, "max_num_seqs": 4}
    if when == "swapped out":
        options |= {"preemption_mode": "swap"}
    if when == "waiting":
        options |= {"max_num_seqs": 1}
    driver = Driver(make_core(**options))
    driver.add(make_request("other", [9] * 5, max_tokens=35))
    driver.step()
    driver.add(make_request("r", list(range(12)), max_tokens=20))
    core = driver.core
    for _ in range({"waiting": 2, "in its prompt": 2, "decoding": 8}.get(when, 60)):
        driver.step()
        request = core.requests["r"]
        if request.num_preemptions and request in core.scheduler.waiting.requests():
            break
    assert (core.requests["r"].num_preemptions > 0) == (when in ("preempted", "swapped out"))
    core.abort(["r", "nobody"])
    core.check()
    other = core.requests["other"].live[0]
    assert core.kv.pool.num_used == len(other.block_ids)
    if core.scheduler.swap is not None:
        assert core.scheduler.swap.num_used == 0
    said = len(driver.answers["r"].deltas)
    driver.run()
    assert len(driver.answers["r"].deltas) == said, "nothing more is said of an aborted request"
    assert core.stats().requests_aborted == 1
    assert driver.answers["other"].tokens == run_alone(make_request("other", [9] * 5, max_tokens=35)).tokens


def test_one_of_n_sequences_can_be_stopped() -> None:
    request = make_request("r", list(range(9)), greedy=False, n=3, max_tokens=10)
    driver = Driver(make_core())
    driver.add(request)
    for _ in range(4):
        driver.step()
    driver.core.abort([], [("r", 1), ("r", 7), ("nobody", 0)])
    driver.core.check()
    answer, alone = driver.run()["r"], run_alone(request)
    assert answer.tokens[1] == alone.tokens[1][:4]
    assert (answer.tokens[0], answer.tokens[2]) == (alone.tokens[0], alone.tokens[2])
    assert answer.finished
    assert 1 not in answer.finish_reasons, "the client knows: it stopped it"


@pytest.mark.parametrize("delivered", [1, 5, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_resume_goes_on_where_the_last_core_died(n: int, delivered: int) -> None:
    request = make_request("r", list(range(9)), greedy=False, n=n, max_tokens=10, min_tokens=3, presence_penalty=0.5)
    alone = run_alone(request)
    driver = Driver(make_core(num_blocks=20))
    request.resume_token_ids = [alone.tokens[index][: delivered - (index == 1)] for index in range(n)]
    if n == 3:
        request.resume_finished = [2]
    driver.add(request)
    answer = driver.run()["r"]
    for index in range(n):
        if index not in request.resume_finished:
            assert request.resume_token_ids[index] + answer.tokens[index] == alone.tokens[index]
        else:
            assert index not in answer.tokens
    assert answer.finished


def test_resume_of_what_was_already_over_says_so_and_computes_nothing() -> None:
    request = make_request("r", [1, 2, 3], max_tokens=4, ignore_eos=True)
    request.resume_token_ids = [run_alone(request).tokens[0]]
    driver = Driver(make_core())
    driver.add(request)
    answer = driver.run()["r"]
    assert (answer.tokens, answer.finish_reasons, answer.finished) == ({0: []}, {0: "length"}, True)
    assert driver.core.executor.steps == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "empty"),
        ([50], {}, "token id 50"),
        ([-1], {}, "token id -1"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1] * 200, {"max_tokens": 57}, "256"),
        ([1] * 256, {"max_tokens": None}, "256"),
        ([1], {"greedy": False, "temperature": float("nan")}, "temperature"),
        ([1], {"greedy": False, "n": 9}, "at most 8 sequences"),
        ([1], {"beam_width": 9, "n": 2}, "at most 8 sequences"),
        ([1], {"resume_token_ids": [[3] * 20]}, "delivered"),
        ([1], {"resume_token_ids": [[99]]}, "vocabulary"),
        ([1], {"structured_outputs": {"json_object": True}}, "structured output"),
    ],
)
def test_bad_requests_are_answered_and_the_engine_lives(prompt: list[int], options: dict, words: str) -> None:
    driver = Driver(make_core())
    driver.add(make_request("good", [1, 2, 3], max_tokens=5))
    driver.add(make_request("bad", prompt, **options))
    answers = driver.run()
    assert answers["bad"].error_kind == "request"
    assert words in (answers["bad"].error or "")
    assert answers["good"].tokens == run_alone(make_request("good", [1, 2, 3], max_tokens=5)).tokens


def test_a_request_id_in_use_is_refused() -> None:
    driver = Driver(make_core())
    driver.core.add_request(make_request("r", [1, 2], max_tokens=5))
    driver.core.add_request(make_request("r", [3, 4], max_tokens=5))
    outputs = driver.core.step().deltas
    errors = [delta.error for delta in outputs if delta.error]
    assert errors == ["request id 'r' is in use: ids must be unique"]
    assert [part.new_token_ids for delta in outputs for part in delta.sequences]


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    driver = Driver(make_core())
    run = driver.core.executor.run

    def poisoned(batch):
        logits = run(batch)
        for row, position in enumerate(batch.logits_rows):
            if batch.token_ids[position] == 13:
                logits[row] = np.nan
        return logits

    driver.core.executor.run = poisoned  # type: ignore[method-assign]
    driver.add(make_request("good", [1, 2], greedy=False, n=2, max_tokens=5))
    driver.add(make_request("bad", [13], greedy=False, n=3, max_tokens=5))
    answers = driver.run()
    assert answers["bad"].error_kind == "request"
    assert "not finite" in (answers["bad"].error or "")
    assert answers["good"].finished
    assert answers["good"].error is None


@pytest.mark.parametrize("model", ["hash", "tiny"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 16}, {"num_blocks": 16, "preemption_mode": "swap"}])
def test_beams_move_on_block_tables(model: str, options: dict) -> None:
    """Beam search through fork and free equals beam search on plain lists, under preemption too."""
    driver = Driver(make_core(model=model, eos_token_ids=(3,), **options))
    prompts = [list(range(9)), list(range(8)), [4, 4, 2, 1]]
    requests = [
        make_request(str(i), prompt, beam_width=3, n=2, max_tokens=16 + i, length_penalty=1.5)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        driver.add(request)
    driver.add(make_request("greedy", [1, 2, 3], max_tokens=30))
    answers = driver.run()
    for request in requests:
        expected = plain_beams(request, model)
        answer = answers[request.request_id]
        assert [answer.tokens[index] for index in range(2)] == [hypothesis.token_ids for hypothesis in expected]
        assert [answer.cumulative[index] for index in range(2)] == [hypothesis.score for hypothesis in expected]
        assert len(answer.deltas) == 1, "hypotheses come whole, at the end"
    if options:
        assert driver.core.stats().preemptions > 0


def plain_beams(request: EngineRequest, model: str) -> list[Hypothesis]:
    """The hypotheses of a search that computes every beam from its first token on."""
    params = request.params
    assert params.max_tokens is not None
    search = BeamSearch(params.beam_width, params.n, (3,), params.max_tokens, params.length_penalty)
    beams = [request.prompt_token_ids]
    while not search.is_done:
        rows = []
        for beam in beams:
            executor = make_core(40, model=model).executor
            count = len(beam)
            batch = StepBatch(
                token_ids=np.array(beam, np.int64),
                positions=np.arange(count),
                past_lens=np.zeros(1, np.int32),
                query_starts=np.array([0, count], np.int32),
                block_ids=np.arange(40, dtype=np.int32),
                block_starts=np.array([0, 40], np.int32),
                max_context_len=count,
                logits_rows=np.array([count - 1]),
            )
            rows.append(executor.run(batch)[0])
        moves = search.step(np.stack(rows))
        beams = [[*beams[move.parent], move.token_id] for move in moves]
    return search.hypotheses()


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
