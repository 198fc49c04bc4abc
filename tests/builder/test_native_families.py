"""Tiny engines of several families on our own attention, against transformers' eager logits over the same steps.

The families are those whose attention differs: windows, softcap, sinks, learned positions, one KV head. Each
advances by a chunk beside a decode (cases 11, 24 and 26).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from native_library import require_native
from onnx_steps import ExecutorSteps, largest_difference
from tiny_artifact import tiny_manifest
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

from builder.backends.openvino import compile_engine, kv_layout
from builder.passes import run_passes
from builder.recipe import BackendConfig, KvConfig, Recipe
from builder.trace import trace
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.executors import open_executor

require_native()

FAMILIES = ("cohere2", "gemma2", "gemma3", "gpt2", "gpt_bigcode", "gpt_oss", "hunyuan", "qwen3")
# Of the largest logit. f32 cells: sums in another order alone. Random weights make every rounding of a cell show.
BOUNDS = {"f32": 2e-5, "int8": 0.1, "bf16": 0.03}


def difference(model, graph: ir.Model, kv: str, folder: Path) -> float:
    recipe = Recipe(
        name="tiny",
        model="tiny",
        backend=BackendConfig(compute="f32", attention="native"),
        kv=KvConfig(key=kv, value=kv),
    )
    graph = run_passes(graph, recipe)
    with ArtifactWriter(folder) as writer:
        info = compile_engine(graph, recipe, writer.path)
        writer.commit(tiny_manifest(backend=info, kv=kv_layout(graph, recipe)))
    executor = open_executor(Artifact.open(folder, verify="full"))
    return largest_difference(ExecutorSteps(executor), model, VOCAB_SIZE)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_native_attention_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(family, tmp_path)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=32)
    assert difference(model, graph, "f32", tmp_path / "engine") < BOUNDS["f32"]


@pytest.mark.parametrize("kv", ["int8", "bf16"])
def test_case_24_smaller_cells_stay_within_their_bound(kv: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint("llama", tmp_path)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=32)
    assert 0 < difference(model, graph, kv, tmp_path / "engine") < BOUNDS[kv]
