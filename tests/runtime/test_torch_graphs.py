"""Decode steps of the torch backend by CUDA graphs, captured and replayed by a stand-in on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_steps import ExecutorSteps, hf_logits
from tiny_artifact import tiny_manifest
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

import torch
from simulated_graph import SimulatedCapture
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from builder.backends.torch import compile_engine, kv_layout
from builder.passes import run_passes
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig
from builder.trace import trace
from plugins.torch_engine.engine import TorchEngine
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.errors import PlancastError
from runtime.executors.torch import TorchExecutor
from runtime.manifest import Limits

LIMITS = Limits(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)
STEPS = ((4, "abc"), (5, "abc"), (6, "abc"), (4, "de"), (5, "de"), (7, "abc"), (6, "de"))


class Family:
    def __init__(self, name: str, folder: Path):
        self.hf = write_tiny_checkpoint(name, folder)
        self.path = folder / "traced.onnx"
        ir.save(trace(open_tiny_checkpoint(folder), max_context_len=64), self.path)

    def build(self, folder: Path, *, kv: Any = ("f32", "f32"), weights: Any = "f32") -> Artifact:
        recipe = Recipe(
            name="tiny", model="tiny", backend=BackendConfig(name="torch"), weights=WeightsConfig(dtype=weights),
            kv=KvConfig(key=kv[0], value=kv[1], block_size=16),
        )  # fmt: skip
        graph = run_passes(ir.load(self.path), recipe)
        with ArtifactWriter(folder) as writer:
            info = compile_engine(graph, recipe, writer.path)
            info.properties["kernels"] = "triton"
            writer.commit(tiny_manifest(backend=info, kv=kv_layout(graph, recipe), limits=LIMITS))
        return Artifact.open(folder, verify="full")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llama-tied-bias", tmp_path_factory.mktemp("llama"))


def decode(executor: TorchExecutor) -> list[np.ndarray]:
    """The logits of the decode steps `STEPS` of five sequences."""
    steps = ExecutorSteps(executor)
    rng = np.random.default_rng(2)
    whole = {name: rng.integers(3, VOCAB_SIZE, 9).tolist() for name in "abcde"}
    steps.step({name: whole[name][:4] for name in "abcde"})
    return [steps.step({name: whole[name][at : at + 1] for name in names}) for at, names in STEPS]


def test_steps_are_padded_captured_and_replayed(llama: Family, tmp_path: Path) -> None:
    """Three, then two sequences: the logits are those of transformers."""
    capture = SimulatedCapture()
    executor = TorchExecutor(llama.build(tmp_path / "engine"), capture=capture)
    got = decode(executor)
    rng = np.random.default_rng(2)
    whole = {name: rng.integers(3, VOCAB_SIZE, 9).tolist() for name in "abcde"}
    expected = {name: hf_logits(llama.hf, tokens) for name, tokens in whole.items()}
    for (at, names), logits in zip(STEPS, got, strict=True):
        assert logits.shape == (len(names), VOCAB_SIZE)
        for row, name in zip(logits, names, strict=True):
            assert np.abs(row - expected[name][at]).max() < 2e-5 * np.abs(expected[name]).max(), (at, name)
    assert executor.graphs is not None
    assert sorted(key[0] for key in executor.graphs.captured) == [2, 4]  # three sequences fill a bucket of four
    assert executor.graphs.replays == 5  # all but the first of each bucket
    assert capture.launches == 5 * (2 * 5 + 1)  # two layers write, attend, gate and norm twice; the last norm
    executor.close()


@pytest.mark.parametrize(
    ("name", "sections"),
    [("llama-tied-bias", {"kv": ("int8", "int4"), "weights": "int8"}), ("gpt2", {})],
    ids=["packed", "other-operators"],
)
def test_what_cannot_be_captured_runs_launch_by_launch(tmp_path: Path, name: str, sections: dict) -> None:
    """And a graph changes nothing: the same bits."""
    artifact = Family(name, tmp_path).build(tmp_path / "engine", **sections)
    works, fails = SimulatedCapture(), SimulatedCapture(fails=True)
    graphs, plain = TorchExecutor(artifact, capture=works), TorchExecutor(artifact, capture=fails)
    for got, expected in zip(decode(graphs), decode(plain), strict=True):
        assert np.array_equal(got, expected)
    assert graphs.graphs is not None
    assert plain.graphs is not None
    assert works.captures == fails.captures == 2  # once a bucket
    assert (graphs.graphs.replays, plain.graphs.replays) == (5, 0)
    assert plain.graphs.captured == []


def test_without_a_gpu_nothing_is_captured(llama: Family, tmp_path: Path) -> None:
    executor = TorchExecutor(llama.build(tmp_path / "engine"))
    executor.allocate(2)
    assert executor.graphs is None
    assert executor.num_blocks == 2


def test_the_spare_block_is_nobodys(llama: Family, tmp_path: Path) -> None:
    """Padding writes into a block that no sequence can name; a new cache makes new graphs."""
    executor = TorchExecutor(llama.build(tmp_path / "engine"), capture=SimulatedCapture())
    executor.allocate(3)
    assert executor.num_blocks == 3
    with pytest.raises(ValueError, match=r"block ids must lie in 0\.\.2, not 3"):
        executor.read_block(3)
    first = decode(executor)
    kept = executor.graphs
    for got, expected in zip(decode(executor), first, strict=True):
        assert np.array_equal(got, expected)
    assert executor.graphs is not kept
    executor.close()
    with pytest.raises(PlancastError, match="closed"):
        executor.allocate(1)


class _OneDevice(TorchDispatchMode):
    """Fails where an operator takes tensors of two devices, or copies between them."""

    def __init__(self, *, placing: bool):
        super().__init__()
        self.placing = placing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        devices = {leaf.device.type for leaf in leaves if leaf.ndim}
        moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert len(devices) < 2 or (moves and self.placing), f"{func} of {devices}"
        return result


@pytest.mark.parametrize("name", ["llama-yarn", "gpt2", "gemma2"])
def test_steps_copy_nothing_between_host_and_device(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph cannot hold: on a device that only knows shapes, the second step of a kind moves nothing."""
    family = Family(name, tmp_path)
    artifact = family.build(tmp_path / "engine")
    engine = TorchEngine(artifact.file("engine.onnx"), device="meta", kernels="triton")
    monkeypatch.setattr(
        engine, "_attend",
        lambda layer, query, *rest, **turn: query.new_empty(
            len(query), layer.attributes["num_heads"] * layer.attributes["v_head_size"]
        ),
    )  # fmt: skip
    monkeypatch.setattr(GridExecutor, "__call__", lambda *arguments, **named: None)
    engine.allocate(4)
    inputs = {
        name: torch.zeros(count, dtype=dtype, device="meta")
        for name, count, dtype in (
            ("input_ids", 3, torch.int64), ("position_ids", 3, torch.int64), ("logits_rows", 3, torch.int64),
            ("past_lens", 3, torch.int32), ("query_starts", 4, torch.int32), ("block_ids", 12, torch.int32),
            ("block_starts", 4, torch.int32),
        )
    } | {"max_context_len": torch.tensor(64, dtype=torch.int32)}  # fmt: skip
    placed: dict[str, torch.Tensor] = {}
    for placing in (True, False):
        with torch.inference_mode(), _OneDevice(placing=placing):
            results = engine.evaluate(inputs, placed)
        assert results["logits"].shape == (3, VOCAB_SIZE)
        assert results["logits"].device.type == "meta"
