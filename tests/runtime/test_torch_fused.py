"""Operators that the Triton kernels of the torch backend compute together: which are found, and what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_steps import ExecutorSteps, largest_difference
from tiny_artifact import tiny_manifest
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

import torch

from builder.backends.torch import compile_engine, kv_layout
from builder.passes import run_passes
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig
from builder.trace import trace
from plugins.torch_engine.engine import TorchEngine
from plugins.torch_engine.fused import ADD_NORM, GATE, NORM, Step, fuse
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.executors.torch import TorchExecutor


def engine_and_artifact(family: str, folder: Path):
    hf = write_tiny_checkpoint(family, folder)
    graph = trace(open_tiny_checkpoint(folder), max_context_len=32)
    recipe = Recipe(
        name="tiny", model="tiny", backend=BackendConfig(name="torch"), weights=WeightsConfig(dtype="f32"),
        kv=KvConfig(key="f32", value="f32", block_size=16),
    )  # fmt: skip
    graph = run_passes(graph, recipe)
    with ArtifactWriter(folder / "engine") as writer:
        info = compile_engine(graph, recipe, writer.path)
        info.properties["kernels"] = "triton"
        writer.commit(tiny_manifest(backend=info, kv=kv_layout(graph, recipe)))
    artifact = Artifact.open(folder / "engine", verify="full")
    return hf, artifact, TorchEngine(artifact.file("engine.onnx"), kernels="triton")


# Of two layers: norms with a sum before them and without, gates, rotary embeddings that were not fused.
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama-tied-bias", {ADD_NORM: 4, NORM: 1, GATE: 2}),
        ("gemma", {ADD_NORM: 4, NORM: 1, GATE: 2}),  # gelu; the norm's weights plus one
        ("qwen3", {ADD_NORM: 4, NORM: 5, GATE: 2}),  # heads are normalized before they turn
    ],
)
def test_what_is_fused_and_its_logits(family: str, expected: dict[str, int], tmp_path: Path) -> None:
    """Prompt, chunks and decode: transformers' logits, with no norm, gate or rotary embedding left on torch."""
    hf, artifact, engine = engine_and_artifact(family, tmp_path)
    operators = engine.operators()
    assert {name: operators[name] for name in (ADD_NORM, NORM, GATE)} == expected
    left = {"RMSNormalization", "RotaryEmbedding", "Sigmoid", "Swish", "Gelu", "Tanh"} & set(operators)
    assert not left
    steps = ExecutorSteps(TorchExecutor(artifact))
    assert 0 < largest_difference(steps, hf, VOCAB_SIZE) < 3e-5


def step(op_type: str, inputs: list[str], outputs: list[str], **attributes) -> Step:
    return Step(op_type, attributes, list(inputs), outputs, [])


HALVES = {"sizes": torch.tensor([4, 4]), "uneven": torch.tensor([2, 6]), "weight": torch.ones(4)}
SPLIT = step("Split", ["x", "sizes"], ["gate", "up"], axis=-1)


@pytest.mark.parametrize(
    ("steps", "outputs", "kept"),
    [
        ([SPLIT, step("Swish", ["gate"], ["t"]), step("Mul", ["up", "t"], ["y"])], {"y"}, [GATE]),
        ([SPLIT, step("Swish", ["gate"], ["t"]), step("Mul", ["up", "t"], ["y"])], {"y", "up"}, None),
        ([SPLIT, step("Swish", ["gate"], ["t"], alpha=1.7), step("Mul", ["t", "up"], ["y"])], {"y"}, None),
        ([SPLIT, step("Swish", ["up"], ["t"]), step("Mul", ["t", "gate"], ["y"])], {"y"}, None),
        ([SPLIT, step("Gelu", ["gate"], ["t"]), step("Mul", ["t", "up"], ["y"])], {"y"}, None),
        ([SPLIT, step("Gelu", ["gate"], ["t"], approximate="tanh"), step("Mul", ["t", "up"], ["y"])], {"y"}, [GATE]),
        (
            [step("Split", ["x", "uneven"], ["gate", "up"], axis=-1), step("Swish", ["gate"], ["t"]),
             step("Mul", ["t", "up"], ["y"])], {"y"}, None,
        ),
        ([step("Add", ["a", "b"], ["s"]), step("RMSNormalization", ["s", "weight"], ["y"])], {"y", "s"}, [ADD_NORM]),
        (
            [step("Add", ["a", "b"], ["s"]), step("Neg", ["s"], ["n"]),
             step("RMSNormalization", ["s", "weight"], ["y"])],
            {"y", "n"}, ["Add", "Neg", NORM],
        ),
        ([step("Add", ["a", "weight"], ["s"]), step("RMSNormalization", ["s", "weight"], ["y"])], {"y"}, ["Add", NORM]),
        ([step("RMSNormalization", ["a", "weight"], ["y"], axis=0)], {"y"}, None),
    ],
)  # fmt: skip
def test_forms(steps: list[Step], outputs: set[str], kept: list[str] | None) -> None:
    """Only what the kernels compute is fused; None: nothing is."""
    found = [each.op_type for each in fuse(steps, HALVES, outputs)]
    assert found == ([each.op_type for each in steps] if kept is None else kept)


def test_the_sum_is_there_for_who_reads_it_later() -> None:
    steps = fuse(
        [step("Add", ["a", "b"], ["s"]), step("RMSNormalization", ["s", "weight"], ["y"]), step("Neg", ["s"], ["n"])],
        HALVES, {"y", "n"},
    )  # fmt: skip
    assert [each.op_type for each in steps] == [ADD_NORM, "Neg"]
    from plugins.torch_engine.ops import HANDLERS

    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.standard_normal((3, 4)).astype(np.float32)) for _ in range(2))
    y, s = HANDLERS[ADD_NORM]({"epsilon": 1e-5}, a, b, HALVES["weight"])
    assert torch.equal(s, a + b)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(a + b, (4,), eps=1e-5))
    y, s = HANDLERS[ADD_NORM]({"epsilon": 1e-5}, a, b[:1], HALVES["weight"])  # a sum that broadcasts
    assert torch.equal(s, a + b[:1])
