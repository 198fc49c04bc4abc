"""The build's stages, each a function from one typed value to the next:

    Recipe -> Checkpoint -> TracedGraph -> LoweredGraph (fused, then quantized) -> CompiledEngine

A later value keeps what the manifest wants of the earlier ones, never their graphs: memory is given back on the way.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.layer_graph import Graphs, LayerGraph, extract_layer, operator_counts, weight_bytes
from builder.recipe import Recipe
from runtime.artifact_writer import is_out_of_space
from runtime.errors import BuildError, PlancastError
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo
from zoo.progress import Progress

if TYPE_CHECKING:
    import onnx_ir as ir

    from zoo.checkpoint import Checkpoint

_FULL = 16 << 20  # bytes free, below which a library's failure to write is a full disk


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """The model as PyTorch runs it, in f32; its weights still lie in the checkpoint."""

    model: ir.Model
    operators: dict[str, int]
    layer: LayerGraph


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """The graph as the backend gets it: fused, in the recipe's dtypes."""

    model: ir.Model
    operators: dict[str, int]
    operators_traced: dict[str, int]
    weights: dict[str, int]  # bytes by dtype
    graphs: Graphs


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """The backend's files, in `folder`, and what the runtime must know of them."""

    folder: Path
    backend: BackendInfo
    kv: KvLayout
    operators: dict[str, int]
    operators_traced: dict[str, int]
    weights: dict[str, int]
    graphs: Graphs


def pull(recipe: Recipe, progress: Progress) -> Checkpoint:
    """The recipe's model on disk. Raises `ZooError` where it cannot be had, `BuildError` where it is too short."""
    import zoo

    checkpoint = zoo.resolve(recipe.model, trust_remote_code=recipe.trust_remote_code, progress=progress)
    check_context(recipe, checkpoint)
    return checkpoint


def check_context(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise `BuildError` where the recipe asks for more context than the model was made for."""
    length, asked = checkpoint.context_length, recipe.limits.max_context_len
    if length is not None and asked > length:
        raise BuildError(
            f"limits.max_context_len is {asked}, and {checkpoint.name} was made for {length} tokens; "
            f"lower it: --set limits.max_context_len={length}"
        )


def trace(recipe: Recipe, checkpoint: Checkpoint) -> TracedGraph:
    """Trace the checkpoint. Raises `BuildError` where the model is of a kind that cannot be traced right."""
    from builder import trace as tracer

    model = tracer.trace(
        checkpoint, max_context_len=recipe.limits.max_context_len, trust_remote_code=recipe.trust_remote_code
    )
    return TracedGraph(model, operator_counts(model), extract_layer(model))


def lower(recipe: Recipe, traced: TracedGraph, progress: Progress) -> LoweredGraph:
    """Fuse the graph and bring it into the recipe's dtypes (`traced.model` is used up)."""
    from builder import passes

    model = passes.run_passes(traced.model, recipe, on_pass=lambda name: progress.update(name, 0, None))
    return LoweredGraph(
        model, operator_counts(model), traced.operators, weight_bytes(model), Graphs(traced.layer, extract_layer(model))
    )


def compile_engine(recipe: Recipe, graph: LoweredGraph, folder: Path, progress: Progress) -> CompiledEngine:
    """Compile the graph with the recipe's backend into `folder`. Raises `BuildError` where it cannot."""
    from builder.backends import openvino as backend

    try:
        info = backend.compile_engine(graph.model, recipe, folder, progress)
        layout = backend.kv_layout(graph.model, recipe)
    except (PlancastError, RuntimeError, OSError) as error:
        # Libraries written in C++ say only that writing failed.
        if not is_out_of_space(error) and shutil.disk_usage(folder).free < _FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    return CompiledEngine(folder, info, layout, graph.operators, graph.operators_traced, graph.weights, graph.graphs)
