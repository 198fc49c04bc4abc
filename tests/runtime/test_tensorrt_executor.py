"""TensorRT's engine as the GPU would run it, on a simulated one: the executor's own calls to a simulated library, whose
engines are run by torch, and their plugins by Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from block_moves import check_block_moves, one_sequence
from core_driver import Answer, Driver, make_request
from onnx_steps import ExecutorSteps, hf_logits, largest_difference
from tiny_families import VOCAB_SIZE, write_traced_llama

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

from device_artifact import DeviceArtifact
from simulated_gpu import SimulatedGpu
from simulated_trt import engine_bytes, lacking

from builder.backends.segment_kernels import side_kernels
from builder.backends.segment_plan import ENGINE, make_engine_plan
from builder.backends.tensorrt import PLAN, engine_info, kv_layout, plugin_graph, profiles
from builder.passes import run_passes
from builder.recipe import KvConfig, LimitsConfig, Recipe
from builder.tracing.signature import attention_nodes
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.errors import ArtifactError, PlancastError
from runtime.executors.segments.device import MIXED
from runtime.executors.segments.engines import load_library
from runtime.executors.segments.executor import SegmentExecutor, check_architecture

LIMITS = LimitsConfig(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)
MAX_BLOCKS = 400


class Built(DeviceArtifact):
    """A tiny Llama with our plugins in it, as the builder gives it to TensorRT."""

    def __init__(self, folder: Path, traced: Path, kv: Any = "f16", streamable: int = 0):
        recipe = Recipe(name="tiny", model="tiny", limits=LIMITS, kv=KvConfig(key=kv, value=kv, block_size=16))
        model = run_passes(ir.load(traced), recipe)
        # The interpreter knows fp8 by integer arithmetic, as kernels for SM80 do.
        graph, kernels = plugin_graph(model, 80), side_kernels(attention_nodes(model))
        (folder / PLAN).write_bytes(engine_bytes(graph, profiles(graph, recipe), streamable))
        plan = make_engine_plan(graph, kernels, engine_info(graph), kernels.described(80), MAX_BLOCKS)
        super().__init__(folder, "tensorrt", plan, kernels.variants(80), kv_layout(model, recipe), "SM89")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_traced_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def built(model, tmp_path: Path) -> Built:
    return Built(tmp_path, model[1])


@pytest.mark.parametrize(("kv", "bound"), [("f16", 0.01), ("int8", 0.03), ("fp8_e4m3", 0.15)])
def test_the_logits_are_those_of_transformers(model, tmp_path: Path, kv: str, bound: float) -> None:
    """Caches are bound to the pool, page by page of the layout that blocks are counted by."""
    built = Built(tmp_path, model[1], kv)
    cell = {"f16": 2}.get(kv, 1)
    pages = sum(int(np.prod(shape)) * cell for shape in built.plan.caches.values())
    assert pages == built.artifact.manifest.kv.bytes_per_block
    assert "max_context_len" not in built.plan.segments[0].inputs
    executor, gpu = built.open()
    assert 0 < largest_difference(ExecutorSteps(executor), model[0], VOCAB_SIZE) < bound
    (engine,) = gpu.trt.engines
    assert len(engine.contexts) == 2  # a chunk beside a decode; a decode alone
    executor.close()
    executor.close()


def test_decodes_are_captured_and_run_by_their_own_profile(built: Built, model) -> None:
    executor, gpu = built.open()
    steps = ExecutorSteps(executor)
    whole = {name: np.random.default_rng(i).integers(3, VOCAB_SIZE, 9).tolist() for i, name in enumerate("abcde")}
    steps.step({name: whole[name][:4] for name in "abcde"})
    expected = {name: hf_logits(model[0], tokens) for name, tokens in whole.items()}
    for at, names in ((4, "abc"), (5, "abc"), (6, "abc"), (4, "de"), (5, "de"), (7, "abc"), (6, "de")):
        logits = steps.step({name: whole[name][at : at + 1] for name in names})
        for row, name in zip(logits, names, strict=True):
            assert np.abs(row - expected[name][at]).max() < 0.01 * np.abs(expected[name]).max(), (at, name)
    assert sorted(executor.graphs) == [(2, "whole"), (4, "whole")]
    assert gpu.replays == 5  # all but the first of each bucket
    (engine,) = gpu.trt.engines
    assert [(context.profile, context.runs) for context in engine.contexts] == [(1, 1), (0, 4), (0, 3)]
    assert not gpu.launched  # no kernel of ours beside it
    executor.close()


def test_copies_and_blocks_on_the_host(built: Built) -> None:
    executor, _ = built.open()
    check_block_moves(executor)


class _Driven(SegmentExecutor):
    def poison(self, blocks: list[int]) -> None:
        """The driver's: NaNs into blocks that nobody owns."""
        for block in blocks:
            self.write_block(block, b"\xff" * self.kv_layout.bytes_per_block)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "longer": {"temperature": 0.0, "max_tokens": 12},
    "seeded": {"temperature": 0.8, "logprobs": 3},
    "top_k": {"temperature": 1.1, "top_k": 8},
    "hosted": {"temperature": 0.9, "repetition_penalty": 1.2},
}


def answers(built: Built, num_blocks: int) -> tuple[dict[str, Answer], Any]:
    """What the whole runtime answers."""
    executor, gpu = built.open(_Driven)
    executor.allocate(num_blocks)
    config = EngineConfig(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)
    driver = Driver(EngineCore(executor, config))
    for i, (name, options) in enumerate(REQUESTS.items()):
        driver.add(make_request(name, prompt(i), greedy=False, **{"seed": i, "max_tokens": 6} | options))
    done = driver.run()
    executor.close()
    return done, gpu


def prompt(index: int) -> list[int]:
    return np.random.default_rng(index).integers(3, VOCAB_SIZE, 5 + 9 * index).tolist()


def test_the_whole_runtime_gives_the_hosts_tokens(built: Built, model) -> None:
    """Prompts in chunks, decodes by graphs, rows sampled on the device beside one that the host samples: greedy tokens
    are those of transformers, and all are those of an artifact without kernels that sample."""
    done, gpu = answers(built, 20)
    assert gpu.replays > 3
    assert "sample" in gpu.launched
    for i, name in enumerate(("greedy", "longer")):
        (tokens,) = done[name].tokens.values()
        assert len(tokens) == (6, 12)[i]
        logits = hf_logits(model[0], prompt(i) + tokens)
        assert tokens == logits[len(prompt(i)) - 1 : -1].argmax(-1).tolist(), name
    plan = msgspec.structs.replace(built.plan, sample=None, score=None, verify=None)
    built.artifact.file(ENGINE).write_bytes(msgspec.json.encode(plan))
    host, gpu = answers(built, 20)
    assert "sample" not in gpu.launched
    for name, answer in host.items():
        assert answer.error is None
        assert (done[name].tokens, done[name].finish_reasons) == (answer.tokens, answer.finish_reasons), name


def test_weights_that_stay_in_host_memory(model, tmp_path: Path) -> None:
    """At most half of what is free goes to weights; all of them where they fit."""
    built = Built(tmp_path, model[1], streamable=1 << 20)
    for memory, budget, scratch in ((1 << 20, 1 << 19, 1100), (1 << 30, 1 << 20, 1000)):
        device = SimulatedGpu(built.variants, built.plan, memory=memory)
        loaded = device.load_segment(tmp_path / PLAN)
        assert (device.trt.engines[0].weight_streaming_budget_v2, loaded.scratch_bytes()) == (budget, scratch)
    executor, _ = built.open()
    assert 0 < largest_difference(ExecutorSteps(executor), model[0], VOCAB_SIZE) < 0.01
    executor.close()


def test_what_the_engine_does_not_take(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, gpu = built.open()
    with pytest.raises(PlancastError, match=r"KV cache of 400 blocks is more than the engine takes, which is 399; ask"):
        executor.allocate(MAX_BLOCKS)
    executor.allocate(4)
    with pytest.raises(ValueError, match="input_ids has 40 elements, and the engine holds 32"):
        executor.run(one_sequence(np.full(40, 3), 0, 0))
    (engine,) = gpu.trt.engines
    engine.profiles[-1]["input_ids"] = [[1], [2], [2]]  # damaged
    refusal = r"^engine\.plan: TensorRT takes no input_ids of shape \[3\]: input_ids \(3,\) is not in \[1\] to \[2\]$"
    with pytest.raises(PlancastError, match=refusal):
        executor.run(one_sequence([3, 4, 5], 0, 0))
    segment = gpu.load_segment(built.artifact.path / PLAN)
    monkeypatch.setattr(gpu.trt.engines[-1], "create_execution_context", lambda strategy: None)
    with pytest.raises(PlancastError, match=r"^engine\.plan: TensorRT makes no execution context, too little device"):
        segment.enqueue(MIXED, {}, {}, 0)
    executor.close()


def test_an_engine_that_does_not_load(built: Built) -> None:
    (built.artifact.path / PLAN).write_bytes(b"\xffof another version")
    refusal = (
        r"TensorRT 11\.4\.0\.106 does not load the engine on simulated \(SM89\) \(Serialization assertion failed\. "
    )
    with pytest.raises(ArtifactError, match=refusal) as caught:
        built.open()
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError, match=r"built for SM89, and this GPU \(H200\) is SM90; rebuild it"):
        check_architecture(built.artifact, "SM90", "H200")


def test_the_library_is_there_and_of_the_right_version(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {"tensorrt": SimpleNamespace(__version__="10.13.3")}

    def find(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(
        PlancastError, match=r"^TensorRT 10\.13\.3 is installed, and plancast works with 11: pip install '"
    ):
        load_library("tensorrt")
    modules["tensorrt"].__version__ = "11.9"
    assert load_library("tensorrt") is modules["tensorrt"]
    modules["tensorrt_rtx_bindings"] = SimpleNamespace(__version__="1.7.1")
    missing = r"^TensorRT-RTX does not load \(No module named 'tensorrt_rtx_libs'\): pip install 'plancast\[rtx\]'$"
    with pytest.raises(PlancastError, match=missing):
        load_library("tensorrt_rtx")
    modules["tensorrt_rtx_libs"] = SimpleNamespace()
    assert load_library("tensorrt_rtx") is modules["tensorrt_rtx_bindings"]


def test_the_library_has_what_is_simulated() -> None:
    """Every name that the executor calls, and how it is called, is in TensorRT-RTX's module, which has TensorRT's
    runtime."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs TensorRT-RTX (pip install 'plancast[rtx]')")
    assert lacking(load_library("tensorrt_rtx")) == []
