"""Embeddings through the engine core: pooled over chunks, preemptions and the prefix cache as over the whole prompt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_model import TinyEmbedder
from tiny_served import write_served_artifact

from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.errors import RequestError
from runtime.llm import LLM
from runtime.manifest import EmbeddingInfo, Pooling
from runtime.messages import EngineRequest
from runtime.outputs import RequestOutput
from runtime.pooling import Pooler, embedding_of
from runtime.sampling_params import SamplingParams

POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")
VOCAB = 96


def pooled(hidden: NDArray[np.float32], pooling: Pooling) -> NDArray[np.float64]:
    """What a text's hidden states [T, H] come to."""
    wide = hidden.astype(np.float64)
    return {"last": wide[-1], "mean": wide.mean(0), "cls": wide[0]}[pooling]


def core_of(pooling: Pooling, num_blocks: int, **options: Any) -> EngineCore:
    values: dict[str, Any] = {"max_context_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | options
    return EngineCore(TinyEmbedder(seed=5), EngineConfig(pooling=pooling, num_blocks=num_blocks, **values))


def request(name: str, prompt: list[int], priority: int = 0) -> EngineRequest:
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0, priority=priority)


def run(core: EngineCore) -> dict[str, NDArray[np.float32]]:
    found = {}
    while core.has_work():
        for delta in core.step().deltas:
            assert delta.error is None, delta.error
            assert delta.finished
            assert delta.embedding is not None
            found[delta.request_id] = np.frombuffer(delta.embedding, np.float32)
        core.check()
    assert core.kv.pool.num_used == 0
    return found


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_batch_in_chunks_gives_what_each_prompt_gives_alone(pooling: Pooling) -> None:
    rng = np.random.default_rng(0)
    # One token; a chunk and one token more (which looks like a decode); a whole context.
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 5, 17, 33, 64, 16, 2)]
    core = core_of(pooling, 80)
    for number, prompt in enumerate(prompts):
        core.add_request(request(str(number), prompt))
    found = run(core)
    alone = TinyEmbedder(seed=5, num_blocks=16)
    for number, prompt in enumerate(prompts):
        expected = pooled(alone.read_alone(prompt), pooling)
        np.testing.assert_allclose(found[str(number)], expected, atol=1e-5)
    assert core.stats().prompt_tokens == sum(map(len, prompts))
    assert core.stats().generation_tokens == 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_cached_prefix_is_read_only_where_the_last_token_says_all(pooling: Pooling) -> None:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, VOCAB, 24).tolist()
    core = core_of(pooling, 64)
    alone = TinyEmbedder(seed=5, num_blocks=16)
    for number in range(3):
        prompt = [*shared, number]
        core.add_request(request(str(number), prompt))
        np.testing.assert_allclose(run(core)[str(number)], pooled(alone.read_alone(prompt), pooling), atol=1e-5)
    assert (core.stats().prefix_cache_hits > 0) is (pooling == "last")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_prompt_is_pooled_once(pooling: Pooling, mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    low, high = rng.integers(0, VOCAB, 60).tolist(), rng.integers(0, VOCAB, 40).tolist()
    core = core_of(
        pooling,
        18,
        scheduling_policy="priority",
        preemption_mode=mode,
        swap_folder=str(tmp_path),
        swap_space=1 << 20,
        enable_prefix_caching=False,
    )
    core.add_request(request("low", low, priority=5))
    core.step()
    core.step()
    core.add_request(request("high", high, priority=0))
    found = run(core)
    assert core.stats().preemptions == 1
    alone = TinyEmbedder(seed=5, num_blocks=16)
    for name, prompt in (("low", low), ("high", high)):
        np.testing.assert_allclose(found[name], pooled(alone.read_alone(prompt), pooling), atol=1e-5)
    assert list(found) == ["high", "low"]
    core.close()


@settings(max_examples=60, deadline=None)
@given(
    pooling=st.sampled_from(POOLINGS),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    again=st.integers(0, 30),
)
def test_any_chunks_and_a_restart_anywhere(pooling: Pooling, cuts: list[int], again: int) -> None:
    """Feed chunks; after `again` positions start over, as a recompute does."""
    total = sum(cuts)
    rows = np.random.default_rng(total).standard_normal((total, 3)).astype(np.float32)
    ends = list(itertools.accumulate(cuts))
    pooler = Pooler(pooling)

    def feed(until: int) -> None:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if start >= until:
                return
            wanted = pooler.rows_of(start, end - start, last=end == total)
            assert wanted >= (end == total)
            if wanted:
                pooler.take(end - wanted, rows[end - wanted : end])

    feed(min(again, total - 1))
    feed(total)
    np.testing.assert_allclose(pooler.result(), pooled(rows, pooling), atol=1e-6)


def test_dimensions_are_cut_before_the_length_is_set_to_1() -> None:
    info = EmbeddingInfo(size=4, pooling="last", normalize=True)
    vector = np.array([3.0, 4.0, 12.0, 0.0], np.float32)
    output = RequestOutput("r", None, [1], [], True, embedding=vector.tobytes())
    np.testing.assert_allclose(embedding_of(output, info), vector / 13)
    np.testing.assert_allclose(embedding_of(output, info, dimensions=2), [0.6, 0.8])
    np.testing.assert_allclose(embedding_of(output, info, dimensions=3, normalize=False), [3, 4, 12])
    nothing = RequestOutput("r", None, [1], [], True, embedding=np.zeros(4, np.float32).tobytes())
    assert not embedding_of(nothing, info).any()


@pytest.mark.parametrize("in_process", [True, False])
def test_llm_embed(tmp_path: Path, in_process: bool) -> None:
    artifact = write_served_artifact(tmp_path / "a", max_context_len=64, max_num_batched_tokens=32, pooling="mean")
    with LLM(artifact, in_process=in_process, executor_factory="tiny_served:open_embedder") as llm:
        texts = ["The capital of France", "Water boils at", "x"]
        results = llm.embed(texts)
        size = llm.manifest.model.vocab_size
        alone = TinyEmbedder(vocab_size=size, num_blocks=16)
        for text, result in zip(texts, results, strict=True):
            assert result.prompt_token_ids == llm.tokenizer.encode(text)
            expected = pooled(alone.read_alone(result.prompt_token_ids), "mean")
            np.testing.assert_allclose(result.outputs.embedding, expected / np.linalg.norm(expected), atol=1e-5)
        (short,) = llm.embed([[1] * 64], dimensions=7)
        assert len(short.outputs.embedding) == short.outputs.hidden_size == 7
        assert llm.embed([[2] * 99], truncate_prompt_tokens=-1)[0].prompt_token_ids == [2] * 64
        assert llm.embed([]) == []
        for wrong, said in (
            (lambda: llm.embed([[1] * 65]), "65 tokens; the context holds 64"),
            (lambda: llm.embed([[]]), "empty"),
            (lambda: llm.embed("a", dimensions=33), "1 to 32"),
            (lambda: llm.generate("a"), "generates none"),
        ):
            with pytest.raises(RequestError, match=said):
                wrong()


def test_an_engine_that_generates_does_not_embed(tmp_path: Path) -> None:
    artifact = write_served_artifact(tmp_path / "a")
    with (
        LLM(artifact, executor_factory="tiny_served:open_hash") as llm,
        pytest.raises(RequestError, match="task: embed"),
    ):
        llm.embed("a")
