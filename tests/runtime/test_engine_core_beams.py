"""Beam search and grammars in the engine core: the same hypotheses as a plain search, whatever the memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from core_driver import Driver, make_core, make_request
from tiny_model import HashModelExecutor
from tiny_tokenizer import tiny_tokenizer

from runtime.beam import BeamSearch, Hypothesis
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.executor import StepBatch
from runtime.messages import EngineRequest
from runtime.sampler import Sampler
from runtime.structured import GrammarCompiler


def test_beams_that_may_say_nothing_are_refused() -> None:
    driver = Driver(make_core())
    driver.add(make_request("r", [1, 2], beam_width=2, max_tokens=5, allowed_token_ids=[3], bad_words_token_ids=[[3]]))
    answer = driver.run()["r"]
    assert answer.error_kind == "request"
    assert "forbid the whole vocabulary" in (answer.error or "")


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


@pytest.mark.parametrize("num_blocks", [200, 23])
def test_grammar_masks_made_beside_the_pass_with_beams_in_the_batch(num_blocks: int) -> None:
    """Masks are prefetched while the model runs, beams (which have no sampling state) are in the same steps, and
    preemption strikes: the beams are what they are alone, and every text is in the grammar."""
    tokenizer = tiny_tokenizer("byte_level")
    eos = tokenizer.eos_token_id
    grammars = GrammarCompiler(lambda: tokenizer, 512, [eos])
    prefetched: list[list[bool]] = []

    def run(requests: list[EngineRequest], blocks: int) -> Driver:
        executor = HashModelExecutor(512, num_blocks=blocks)
        sampler = Sampler(512, [eos], grammars=grammars)
        prefetch = sampler.prefetch

        def noted(states):
            prefetched.append([state is None for state in states])
            prefetch(states)

        sampler.prefetch = noted  # type: ignore[method-assign]
        config = EngineConfig(max_context_len=256, max_num_seqs=8, max_num_batched_tokens=32, eos_token_ids=(eos,))
        driver = Driver(EngineCore(executor, config, sampler=sampler))
        for request in requests:
            driver.add(request)
        driver.run()
        return driver

    grammar = {"regex": "[ab]{16,24}(cd)*!"}
    requests = [
        make_request("beams", list(range(10)), beam_width=3, n=2, max_tokens=24, ignore_eos=True),
        make_request("pair", list(range(20)), greedy=False, n=2, max_tokens=30, structured_outputs=grammar),
        make_request("greedy", [7, 8, 9], max_tokens=30, structured_outputs=grammar),
        make_request("plain", [4] * 9, max_tokens=60, ignore_eos=True),
    ]
    driver = run(requests, num_blocks)
    assert any(any(states) and not all(states) for states in prefetched), "beams and grammars met in a step"
    assert (driver.core.stats().preemptions > 0) == (num_blocks < 100)
    for request in requests:
        answer = driver.answers[request.request_id]
        assert answer.error is None
        assert answer.tokens == run([request], 400).answers[request.request_id].tokens
        if request.params.structured_outputs:
            for index, tokens in answer.tokens.items():
                if answer.finish_reasons[index] == "stop":
                    assert re.fullmatch(grammar["regex"], tokenizer.decode(tokens))
                else:
                    assert re.match("[ab]{1,24}(cd)*", tokenizer.decode(tokens))
    grammars.close()
