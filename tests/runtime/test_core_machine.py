"""Random lives of the engine core: add, step, abort, resume, under any limits. Every answer equals the oracle's.

The oracle is the hash model and the sampler alone: no blocks, no batches. The model reads its history back from the
blocks, so a stale, lost or overwritten block shows as a wrong token.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
from core_driver import Driver, FakeClock, make_core, make_request
from drafters import ANY_DRAFTS, PartlyRight, hash_draft_engine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tiny_model import HashModelExecutor

from runtime.beam import BeamSearch
from runtime.messages import EngineRequest
from runtime.sampler import Sampler
from runtime.sequence import Sequence
from runtime.speculation.config import parse_speculation

EOS = (7,)
# Few different tokens and one common text, so that prefixes collide and are shared all the time.
TEXT = [1, 2, 3, 1, 2, 3, 4, 4, 1, 2, 3, 1, 2, 3, 4, 4, 5, 6, 1, 2, 3, 3, 3, 3, 3, 3, 9, 8]


SPECULATION = ("none", "drafts", "adaptive drafts", "ngram", "suffix", "draft engine", "draft engine")


def oracle(request: EngineRequest) -> dict[int, list[int]]:
    """What the request's sequences say, from the logits after each history."""
    model, params = HashModelExecutor(), request.params
    if params.beam_width:
        return beam_oracle(request)
    sampler = Sampler(model.vocab_size, EOS)
    answers = {}
    for index in range(params.num_sequences):
        state = sampler.new_state(params, request.prompt_token_ids, index)
        output: list[int] = []
        while len(output) < (params.max_tokens or 10**9):
            logits = model.logits_after(request.prompt_token_ids + output)
            (sampled,) = sampler.sample(logits[None], [state])
            state.append(sampled.token_id)
            output.append(sampled.token_id)
            if sampled.token_id in EOS and not params.ignore_eos:
                break
        answers[index] = output
    return answers


def beam_oracle(request: EngineRequest) -> dict[int, list[int]]:
    """The hypotheses of a beam search whose beams are plain lists."""
    model, params = HashModelExecutor(), request.params
    assert params.max_tokens is not None
    eos = () if params.ignore_eos else EOS
    search = BeamSearch(params.beam_width, params.n, eos, params.max_tokens, params.length_penalty)
    beams = [request.prompt_token_ids]
    while not search.is_done:
        moves = search.step(np.stack([model.logits_after(beam) for beam in beams]))
        beams = [[*beams[move.parent], move.token_id] for move in moves]
    return {index: hypothesis.token_ids for index, hypothesis in enumerate(search.hypotheses())}


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 5),
        num_cells=st.integers(16, 70),
        options=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(4, 8),
                "max_num_batched_tokens": st.integers(8, 24),
                "max_prefill_chunk": st.sampled_from([None, 1, 3, 7]),
                "enable_prefix_caching": st.booleans(),
                "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
                "batching": st.sampled_from(["in_flight", "in_flight", "static"]),
                "max_preemptions": st.integers(0, 2),
                "starvation_turn": st.integers(1, 4),
                "preemption_mode": st.sampled_from(["recompute", "swap"]),
                "swap_cached_blocks": st.booleans(),
                "swap_space": st.sampled_from([300, 1000, 1 << 16]),
                "tpot_slo": st.sampled_from([None, 1e-7, 1e-3]),
            }
        ),
        speculation=st.sampled_from(SPECULATION),
        model=st.sampled_from(["hash", "device"]),
    )
    def start(self, block_size: int, num_cells: int, options: dict[str, Any], speculation: str, model: str) -> None:
        limits = {"max_context_len": 64, "eos_token_ids": EOS}
        self.oracles: dict[str, dict[int, list[int]]] = {}
        if speculation == "drafts":  # at full length
            options["drafter"] = PartlyRight(self.answer_of, HashModelExecutor().vocab_size)
        elif speculation == "adaptive drafts":
            options["drafter"] = PartlyRight(self.answer_of, HashModelExecutor().vocab_size)
            options["speculation"] = msgspec.structs.replace(ANY_DRAFTS, adaptive=True)
        elif speculation == "draft engine":
            options["drafter"] = hash_draft_engine(num_blocks=num_cells // 4, block_size=3, right=0.7)
        elif speculation != "none":
            options["speculation"] = parse_speculation(
                {
                    "method": speculation,
                    "adaptive": False,
                    "prompt_lookup_min": 1,
                    "suffix_decoding_max_cached_tokens": 100,
                }
            )
        core = make_core(
            num_cells // block_size, model=model, block_size=block_size, clock=FakeClock(tick=1e-4), **limits, **options
        )
        self.driver = Driver(core)
        self.requests: dict[str, EngineRequest] = {}
        self.stopped: set[tuple[str, int]] = set()
        self.aborted: set[str] = set()
        self.work = 0  # bound on the steps that what was added may take

    @rule(
        length=st.integers(1, 28),
        skip=st.integers(0, 3),
        width=st.sampled_from(
            [(1, None, 0), (1, None, 0), (1, 4, 0), (2, None, 0), (4, None, 0), (1, None, 2), (2, None, 4)]
        ),
        max_tokens=st.integers(1, 25),
        greedy=st.booleans(),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        user=st.sampled_from([None, "a", "b"]),
        cache_salt=st.sampled_from([None, None, "x"]),
        delivered=st.sampled_from([0, 0, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def add(self, length: int, skip: int, width: tuple[int, int | None, int], delivered: int, **options: Any) -> None:
        request_id = f"r{len(self.requests)}"
        n, best_of, beam_width = width
        greedy = options.pop("greedy") and n == 1 and best_of is None
        if beam_width:
            options["beam_width"] = beam_width
        if not greedy:
            options |= {"n": n, "best_of": best_of, "seed": length}
        request = make_request(request_id, TEXT[skip : skip + length], greedy=greedy, **options)
        self.requests[request_id] = request
        if delivered and not beam_width:
            before = oracle(request)
            request.resume_token_ids = [before[index][: delivered + index] for index in sorted(before)]
        self.driver.add(request)
        tokens = len(request.prompt_token_ids) + (request.params.max_tokens or 0) + 1
        preemptions = self.driver.core.config.max_preemptions
        self.work += (preemptions + 2) * max(request.params.num_sequences, beam_width) * tokens

    def answer_of(self, sequence: Sequence) -> list[int]:
        request_id = sequence.request.request_id
        if request_id not in self.oracles:
            request = self.requests[request_id]
            self.oracles[request_id] = oracle(msgspec.structs.replace(request, resume_token_ids=None))
        return self.oracles[request_id][sequence.index]

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.core.has_work():
                self.work -= 1
                self.driver.step()
        assert self.work >= 0, "the core runs more steps than its requests can need"

    @precondition(lambda self: self.driver.core.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.driver.core.requests)))
        self.aborted.add(request_id)
        self.driver.core.abort([request_id])
        self.driver.core.check()

    @precondition(lambda self: self.driver.core.requests)
    @rule(data=st.data())
    def stop_one_sequence(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.driver.core.requests)))
        index = data.draw(st.integers(0, 3))
        alive = [s.index for s in self.driver.core.requests[request_id].live]
        request = self.driver.core.requests[request_id]
        if index in alive and request.forked and request.beam is None:
            self.stopped.add((request_id, index))
            self.driver.core.abort([], [(request_id, index)])
            self.driver.core.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.core.reset_prefix_cache()
        self.driver.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.driver.core.has_work():
            self.step(1)
        core = self.driver.core
        assert core.kv.pool.num_used == 0
        assert core.scheduler.num_slots_used == 0
        if core.scheduler.swap is not None:
            assert core.scheduler.swap.num_used == len(core.kv.spill or ())
        for request_id, request in self.requests.items():
            self._check_answer(request_id, request)
        core.close()
        if core.speculator is not None:
            stats = core.stats()
            assert sum(stats.spec_decode_num_accepted_tokens_per_pos) == stats.spec_decode_num_accepted_tokens

    def _check_answer(self, request_id: str, request: EngineRequest) -> None:
        answer = self.driver.answers[request_id]
        if answer.error is not None:
            assert "KV blocks" in answer.error or "context" in answer.error or "max_num_seqs" in answer.error
            return
        expected = oracle(request)
        for index, tokens in expected.items():
            if request.resume_token_ids is not None:
                tokens = tokens[len(request.resume_token_ids[index]) :]
            got = answer.tokens.get(index, [])
            if request_id in self.aborted or (request_id, index) in self.stopped:
                assert got == tokens[: len(got)]
            else:
                assert got == tokens, (request_id, index)
                assert index in answer.finish_reasons
        if request_id not in self.aborted and not any(stopped == request_id for stopped, _ in self.stopped):
            assert answer.finished
        for delta in answer.deltas:
            assert delta.num_preemptions <= self.driver.core.config.max_preemptions
        scores = answer.prompt_logprobs
        if scores is not None:
            self._check_prompt_logprobs(request, scores)

    def _check_prompt_logprobs(self, request: EngineRequest, scores: list) -> None:
        prompt, model = request.prompt_token_ids, HashModelExecutor()
        assert len(scores) == len(prompt)
        assert scores[0] is None
        for position in range(1, len(prompt)):
            logits = model.logits_after(prompt[:position]).astype(np.float64)
            logprob = logits[prompt[position]] - np.log(np.exp(logits).sum())
            assert scores[position].token_ids[0] == prompt[position]
            np.testing.assert_allclose(scores[position].logprobs[0], logprob, atol=1e-5)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
