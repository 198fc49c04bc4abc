"""The torch executor: the logits of transformers, with every KV format, and with the Triton kernels interpreted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from block_moves import check_block_moves
from onnx_steps import ExecutorSteps, largest_difference
from tiny_artifact import tiny_manifest
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

from builder.backends.torch import compile_engine, kv_layout
from builder.passes import run_passes
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig
from builder.trace import trace
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.errors import ArtifactError, BuildError, PlancastError
from runtime.executor import Executor, StepBatch
from runtime.executors import open_executor


class Tiny:
    """One family's model and its traced graph, of which each test builds what it needs."""

    def __init__(self, family: str, folder: Path):
        self.model = write_tiny_checkpoint(family, folder)
        self.path = folder / "traced.onnx"
        ir.save(trace(open_tiny_checkpoint(folder), max_context_len=32), self.path)

    def build(self, folder: Path, *, kernels: str = "reference", **sections) -> Artifact:
        recipe = Recipe(name="tiny", model="tiny", **{"backend": BackendConfig(name="torch"), **sections})
        graph = run_passes(ir.load(self.path), recipe)
        with ArtifactWriter(folder) as writer:
            info = compile_engine(graph, recipe, writer.path)
            info.properties["kernels"] = kernels
            writer.commit(tiny_manifest(backend=info, kv=kv_layout(graph, recipe)))
        return Artifact.open(folder, verify="full")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny("llama-tied-bias", tmp_path_factory.mktemp("llama"))


def test_the_logits_are_those_of_transformers(llama: Tiny, tmp_path: Path) -> None:
    executor = open_executor(llama.build(tmp_path / "engine"))
    assert isinstance(executor, Executor)
    assert largest_difference(ExecutorSteps(executor), llama.model, VOCAB_SIZE) < 2e-5


def test_weights_in_a_file_of_several_names(llama: Tiny, tmp_path: Path) -> None:
    """Artifacts share large files with the build cache by hard links."""
    int4 = WeightsConfig(dtype="int4", group_size="channel")
    artifact = llama.build(tmp_path / "engine", weights=int4)
    executor = open_executor(artifact)
    before = largest_difference(ExecutorSteps(executor), llama.model, VOCAB_SIZE)
    executor.close()
    (tmp_path / "link").hardlink_to(artifact.path / "engine.onnx.data")
    assert largest_difference(ExecutorSteps(open_executor(artifact)), llama.model, VOCAB_SIZE) == before


def test_a_family_with_other_operators(tmp_path: Path) -> None:
    """gpt2: layer norms with biases, learned positions, gelu, products with biases."""
    gpt2 = Tiny("gpt2", tmp_path)
    executor = open_executor(gpt2.build(tmp_path / "engine"))
    assert largest_difference(ExecutorSteps(executor), gpt2.model, VOCAB_SIZE) < 2e-5


@pytest.mark.parametrize(("kv", "bound"), [("bf16", 0.02), ("int8", 0.03), ("fp8_e4m3", 0.15), ("int4", 0.3)])
def test_kv_formats_and_the_triton_kernels(llama: Tiny, tmp_path: Path, kv: str, bound: float) -> None:
    """Each format is near the original within its own bound, and the kernels agree with the reference."""
    differences = {}
    for kernels in ("reference", "triton") if kv == "int4" else ("reference",):
        if kernels == "triton":
            pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")
        artifact = llama.build(
            tmp_path / kernels,
            kernels=kernels,
            kv=KvConfig(key=kv, value=kv, block_size=16, rotate="both" if kv == "int4" else "none"),
        )
        executor = open_executor(artifact)
        steps = ExecutorSteps(executor)
        differences[kernels] = largest_difference(steps, llama.model, VOCAB_SIZE)
        executor.close()
    assert 0 < differences["reference"] < bound
    if "triton" in differences:
        assert differences["triton"] == pytest.approx(differences["reference"], rel=0.02)


@pytest.mark.parametrize(("compute", "weights", "bound"), [("bf16", "bf16", 0.06), ("f32", "int8", 0.05)])
def test_dtypes(llama: Tiny, tmp_path: Path, compute: str, weights: str, bound: float) -> None:
    artifact = llama.build(
        tmp_path / "engine",
        backend=BackendConfig(name="torch", compute=compute),
        weights=WeightsConfig(dtype=weights),
    )
    assert 0 < largest_difference(ExecutorSteps(open_executor(artifact)), llama.model, VOCAB_SIZE) < bound


def test_copies_and_blocks_on_the_host(llama: Tiny, tmp_path: Path) -> None:
    check_block_moves(open_executor(llama.build(tmp_path / "engine")))


def test_refusals(llama: Tiny, tmp_path: Path) -> None:
    """No GPU, no memory, an unknown operator: one line that says what was found."""
    artifact = llama.build(tmp_path / "engine")
    executor = open_executor(artifact)
    with pytest.raises(PlancastError, match=r"takes .* and .* are free"):
        executor.allocate(1 << 40)
    with pytest.raises(PlancastError, match="call allocate first"):
        executor.read_block(0)
    backend = msgspec.structs.replace(artifact.manifest.backend, device="CUDA")
    on_gpu = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, backend=backend))
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ArtifactError, match=r"built for CUDA, and (this torch|torch finds no)"):
            open_executor(on_gpu)
    graph = ir.load(llama.path)
    node = next(node for node in graph.graph if node.op_type == "MatMul")
    node.op_type = "Einsum"
    with pytest.raises(BuildError, match="Einsum, which the torch backend does not compute"):
        compile_engine(graph, Recipe(name="tiny", model="tiny", backend=BackendConfig(name="torch")), tmp_path)
    assert not (tmp_path / "engine.onnx").exists()


def test_far_positions_are_exact_in_bf16(llama: Tiny, tmp_path: Path) -> None:
    """Rotary attention knows distances alone: the same tokens a thousand positions on give the same logits, which
    angles in bf16 do not (it has no odd numbers above 256)."""
    backend, weights = BackendConfig(name="torch", compute="bf16"), WeightsConfig(dtype="bf16")
    executor = open_executor(llama.build(tmp_path / "engine", backend=backend, weights=weights))
    executor.allocate(8)
    count = 12
    logits = [
        executor.run(
            StepBatch(
                token_ids=np.arange(3, 3 + count),
                positions=np.arange(first, first + count),
                past_lens=np.zeros(1, np.int32),
                query_starts=np.array([0, count], np.int32),
                block_ids=np.arange(2, dtype=np.int32),
                block_starts=np.array([0, 2], np.int32),
                max_context_len=count,
                logits_rows=np.arange(count),
            )
        ).copy()
        for first in (0, 1001)
    ]
    assert np.abs(logits[0] - logits[1]).mean() < 0.05  # 1.1 with angles in bf16
