"""Segments and kernels as the GPU would run them, on a simulated one: torch for the engines, Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from block_moves import check_block_moves, one_sequence
from onnx_steps import ExecutorSteps, largest_difference
from tiny_families import VOCAB_SIZE, write_traced_llama

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

from device_artifact import DeviceArtifact

from builder.backends.segment_plan import ENGINE, cut, make_plan
from builder.backends.tensorrt_rtx import kv_layout
from builder.passes import run_passes
from builder.recipe import KvConfig, LimitsConfig, Recipe
from plugins.sampling.variants import sample_variant
from runtime.errors import ArtifactError, PlancastError
from runtime.executor import DeviceExecutor, DrawnDrafts, Executor, RowSampling
from runtime.executors.sampling_blocks import MAX_DRAFT_ENTRIES, told_block
from runtime.executors.segments.executor import check_architecture
from runtime.executors.segments.plan import Segment
from runtime.sampler import Sampler, SamplingState
from runtime.sampling.device_rows import token_of
from runtime.sampling_params import SamplingParams
from runtime.speculation.verification import accept_or_replace

LIMITS = LimitsConfig(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)


class Built(DeviceArtifact):
    """A tiny Llama cut into segments, which torch runs here in place of TensorRT-RTX."""

    def __init__(self, folder: Path, graph: Path, kv: KvConfig):
        recipe = Recipe(name="tiny", model="tiny", limits=LIMITS, kv=kv)
        model = run_passes(ir.load(graph), recipe)
        layout = kv_layout(model, recipe)
        segments, kernels = cut(model)
        infos = []
        for i, segment in enumerate(segments):
            ir.save(segment.model, folder / f"segment-{i}.onnx")
            infos.append(Segment(f"segment-{i}.onnx", tuple(segment.inputs), tuple(segment.outputs)))
        plan = make_plan(segments, kernels, infos, kernels.described(89))
        # The interpreter knows fp8 by integer arithmetic.
        super().__init__(folder, "tensorrt_rtx", plan, kernels.variants(80), layout, "SM86 SM89")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_traced_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def built(model, tmp_path: Path) -> Built:
    return Built(tmp_path, model[1], KvConfig(key="f16", value="f16", block_size=16))


@pytest.mark.parametrize(("kv", "bound"), [("f16", 0.01), ("int8", 0.03), ("fp8_e4m3", 0.15)])
def test_the_logits_are_those_of_transformers(model, tmp_path: Path, kv: str, bound: float) -> None:
    hf, graph = model
    executor, _ = Built(tmp_path, graph, KvConfig(key=kv, value=kv, block_size=16)).open()
    assert isinstance(executor, Executor)
    assert 0 < largest_difference(ExecutorSteps(executor), hf, VOCAB_SIZE) < bound
    executor.close()
    executor.close()


def test_decode_steps_are_captured_and_replayed(built: Built, model) -> None:
    """Three, then five sequences, each step padded to its bucket: the logits are those of the launches one by one."""
    from onnx_steps import hf_logits

    executor, gpu = built.open()
    steps = ExecutorSteps(executor)
    rng = np.random.default_rng(2)
    whole = {name: rng.integers(3, VOCAB_SIZE, 9).tolist() for name in "abcde"}
    steps.step({name: whole[name][:4] for name in "abcde"})
    expected = {name: hf_logits(model[0], tokens) for name, tokens in whole.items()}
    for at, names in ((4, "abc"), (5, "abc"), (6, "abc"), (4, "de"), (5, "de"), (7, "abc"), (6, "de")):
        logits = steps.step({name: whole[name][at : at + 1] for name in names})
        for row, name in zip(logits, names, strict=True):
            assert np.abs(row - expected[name][at]).max() < 0.01 * np.abs(expected[name]).max(), (at, name)
    assert sorted(size for size, _ in executor.graphs) == [2, 4]
    assert gpu.replays == 5  # all but the first of each bucket
    executor.close()


def test_split_keys_and_short_ones_agree(built: Built) -> None:
    """A long context on an idle device shares its keys out; the same logits come from one piece."""
    differences = []
    for multiprocessors in (1, 10_000):
        plan = msgspec.json.decode(msgspec.json.encode(built.plan), type=type(built.plan))
        executor, gpu = built.open(multiprocessors=multiprocessors)
        # Contexts here are shorter than a tile of keys: let them be shared out all the same.
        for name, kernel in executor.plan.kernels.items():
            if kernel.constants.get("SPLITS", 1) > 1 and "BLOCK_N" in kernel.constants:
                executor.plan.kernels[name].constants["BLOCK_N"] = 0
        steps = ExecutorSteps(executor)
        steps.step({"a": list(range(3, 30))})
        differences.append(steps.step({"a": [5]}))
        assert (plan.attentions[0].merge in gpu.launched) is (multiprocessors > 1)
        executor.close()
    assert np.abs(differences[0] - differences[1]).max() < 0.01


def test_copies_and_blocks_on_the_host(built: Built) -> None:
    executor, _ = built.open()
    check_block_moves(executor)


def test_rows_are_sampled_where_their_logits_lie(built: Built) -> None:
    """A prompt's step, a decode, and two replays of its graph: the host sampler's tokens and log probabilities, with
    next to nothing copied; the rows that the device leaves alone come as logits."""
    executor, gpu = built.open()
    assert isinstance(executor, DeviceExecutor)
    steps = ExecutorSteps(executor)
    whole = {name: np.random.default_rng(i).integers(3, VOCAB_SIZE, 12).tolist() for i, name in enumerate("abcde")}
    sampler = Sampler(VOCAB_SIZE, ())
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, seed=5, logprobs=3),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.9, seed=6),
        SamplingParams(temperature=0.8, seed=7, min_p=0.2),  # left to the host below
        SamplingParams(temperature=1.0, seed=8),
    ]
    states = [sampler.new_state(each, [1]) for each in params]
    hosted = 3
    for at, count in ((0, 6), (6, 1), (7, 1), (8, 1)):
        new = {name: whole[name][at : at + count] for name in "abcde"}
        last = [count * (i + 1) - 1 for i in range(5)]
        expected = {}

        def run(batch, last=last, expected=expected):
            batch.logits_rows = np.array(last)
            expected["logits"] = executor.run(batch).copy()  # writes the same cells that the step after it writes
            gpu.downloaded = 0
            executor.launch(batch, sampling_of(states, hosted))
            return executor.collect()

        steps.run = run
        logits, sampled = steps.step(new)
        tokens = sampler.sample(expected["logits"], states)
        assert sampled.tokens.tolist() == [-1 if i == hosted else token.token_id for i, token in enumerate(tokens)]
        assert np.array_equal(logits[hosted], expected["logits"][hosted])
        token = token_of(sampled.tokens.tolist(), sampled.scores, 1, states[1])
        assert token is not None
        assert token.logprobs is not None
        assert tokens[1].logprobs is not None
        assert token.logprobs.token_ids == tokens[1].logprobs.token_ids
        np.testing.assert_allclose(token.logprobs.logprobs, tokens[1].logprobs.logprobs, atol=1e-5)
        assert gpu.downloaded == 4 * VOCAB_SIZE + told_block(5).size
        for state, each in zip(states, tokens, strict=True):
            state.append(each.token_id)
    assert gpu.replays == 5  # both runs of each decode but the very first
    executor.launch(one_sequence([4, 5], 0, 0), sampling_of(states[:1], -1))
    gpu.downloaded = 0
    _, sampled = executor.collect()
    assert sampled is not None
    assert sampled.scores is None
    assert gpu.downloaded == 0
    executor.close()


def test_drafts_are_verified_where_their_logits_lie(built: Built) -> None:
    """Tokens that were drawn at random, at rows of two sequences beside one without a draft: the host's verdicts, with
    four bytes a row copied."""
    executor, gpu = built.open()
    assert executor.max_draft_entries == MAX_DRAFT_ENTRIES
    executor.allocate(8)
    rng = np.random.default_rng(6)
    batch = one_sequence(rng.integers(3, VOCAB_SIZE, 9).tolist(), 0, 0)
    batch.logits_rows = np.arange(1, 9)
    logits = executor.run(batch).copy()
    sampler = Sampler(VOCAB_SIZE, ())
    settings = [{"top_k": 40}, {"top_k": 40}, {"top_k": 40}, {"min_p": 0.05}, {}, {}, {}, {"top_p": 0.7}]
    states = [
        sampler.new_state(SamplingParams(temperature=0.9, seed=5 + i, **each), [1], 0, [0] * i)
        for i, each in enumerate(settings)
    ]
    rows, distributions, drafted = [0, 1, 4, 5, 6], [], []
    for row in rows:
        ids, probs = sampler.distribution(logits[row], states[row])  # a draft that knows it all
        if row % 2 == 0:
            ids, probs = np.sort(rng.choice(VOCAB_SIZE, 12, replace=False)), rng.dirichlet(np.ones(12))
        distributions.append((ids, probs))
        drafted.append(int(rng.choice(ids, p=distributions[-1][1])))
    expected = [token.token_id for token in sampler.sample(logits, states)]
    for row, q, token in zip(rows, distributions, drafted, strict=True):
        expected[row] = accept_or_replace(*sampler.distribution(logits[row], states[row]), q, token, states[row])
    sampling = sampling_of(states, -1)
    sampling.drafts = DrawnDrafts(
        np.array(rows, np.int32), np.array(drafted, np.int32),
        np.cumsum([0, *(len(ids) for ids, _ in distributions)], dtype=np.int32),
        np.concatenate([ids for ids, _ in distributions]).astype(np.int32),
        np.concatenate([probs for _, probs in distributions]).astype(np.float32),
    )  # fmt: skip
    gpu.downloaded = 0
    executor.launch(batch, sampling)
    _, sampled = executor.collect()
    assert sampled is not None
    assert sampled.tokens.tolist() == expected
    assert [expected[row] for row in rows] != drafted
    assert any(expected[row] == token for row, token in zip(rows, drafted, strict=True))
    assert gpu.downloaded == 4 * len(settings)
    executor.close()


def test_an_artifact_without_the_kernel_for_drafts(built: Built) -> None:
    """One built before there was any: it samples and verifies nothing."""
    plan = msgspec.structs.replace(built.plan, verify=None)
    built.artifact.file(ENGINE).write_bytes(msgspec.json.encode(plan))
    executor, _ = built.open()
    assert executor.max_top_logprobs is not None
    assert executor.max_draft_entries == 0
    executor.close()


def test_a_row_that_the_device_cannot_finish_comes_as_logits(built: Built) -> None:
    """top_k leaves more candidates than the kernel takes, which is compiled for few here."""
    executor, gpu = built.open()
    gpu.variants = {**built.variants, "sample": sample_variant(most=10)}
    executor.allocate(4)
    batch = one_sequence([4, 5, 6], 0, 0)
    expected = executor.run(batch).copy()
    state = Sampler(VOCAB_SIZE, ()).new_state(SamplingParams(temperature=1.0, seed=1, top_k=11), [1])
    executor.launch(batch, sampling_of([state], -1))
    logits, sampled = executor.collect()
    assert sampled is not None
    assert sampled.tokens.tolist() == [-2]
    assert np.array_equal(logits, expected)
    executor.close()


def test_an_artifact_without_sampling_kernels(built: Built) -> None:
    """One built before there were any: logits alone."""
    plan = msgspec.structs.replace(built.plan, sample=None, score=None, verify=None)
    built.artifact.file(ENGINE).write_bytes(msgspec.json.encode(plan))
    executor, _ = built.open()
    assert (executor.max_top_logprobs, executor.max_draft_entries) == (None, 0)
    executor.allocate(4)
    batch = one_sequence([4, 5, 6], 0, 0)
    expected = executor.run(batch).copy()
    executor.launch(batch, sampling_of([Sampler(VOCAB_SIZE, ()).new_state(SamplingParams(), [1])], -1))
    logits, sampled = executor.collect()
    assert sampled is None
    assert np.array_equal(logits, expected)
    executor.close()


def sampling_of(states: list[SamplingState], hosted: int) -> RowSampling:
    """How to sample a row for each state, but for row `hosted`."""
    return RowSampling(
        temperatures=np.array(
            [-1.0 if i == hosted else 0.0 if s.greedy else s.params.temperature for i, s in enumerate(states)],
            np.float32,
        ),
        top_ks=np.array([s.params.top_k for s in states], np.int32),
        top_ps=np.array([s.params.top_p for s in states], np.float32),
        min_ps=np.array([s.params.min_p for s in states], np.float32),
        seeds=np.array([s.seed for s in states], np.uint64),
        sequences=np.array([s.sequence_index for s in states], np.int32),
        positions=np.array([s.position for s in states], np.int32),
        num_tops=np.array([-1 if s.num_top is None else s.num_top for s in states], np.int32),
    )


def test_a_step_larger_than_the_engine(built: Built) -> None:
    executor, _ = built.open()
    executor.allocate(4)
    with pytest.raises(ValueError, match="input_ids has 40 elements, and the engine holds 32"):
        executor.run(one_sequence(np.full(40, 3), 0, 0))
    executor.close()


def test_too_little_memory_and_other_gpus(built: Built) -> None:
    with pytest.raises(PlancastError, match=r"the values between segments take .* are free on simulated"):
        built.open(memory=1000)
    executor, _ = built.open()
    with pytest.raises(PlancastError, match=r"a KV cache of 1000000000 blocks takes .* are free on simulated"):
        executor.allocate(10**9)
    with pytest.raises(PlancastError, match="call allocate first"):
        executor.read_block(0)
    with pytest.raises(ArtifactError, match=r"built for SM86, SM89, and this GPU \(H200\) is SM90; rebuild it"):
        check_architecture(built.artifact, "SM90", "H200")
    built.artifact.file(ENGINE).write_text("{")
    with pytest.raises(ArtifactError, match=r"segments\.json: cannot be read"):
        built.open()
