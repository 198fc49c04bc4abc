"""The build's stages, each a function from one typed value to the next:

    Recipe -> Checkpoint -> TracedGraph -> FusedGraph -> QuantizedGraph -> CompiledEngine

A later value keeps what the manifest wants of the earlier ones, never their graphs: memory is given back on the way.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from builder.layer_graph import Graphs, LayerGraph, extract_layer, operator_counts, weight_bytes
from builder.recipe import Recipe
from runtime.artifact_writer import is_out_of_space
from runtime.errors import BuildError, PlancastError
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo
from zoo.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

    from builder.quantization.prepare import PreparedWeights
    from zoo.checkpoint import Checkpoint

_LIBRARIES = ("torch", "transformers", "accelerate", "onnx", "onnx_ir", "onnxscript")
_FULL = 16 << 20  # bytes free, below which a library's failure to write is a full disk


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """The model as PyTorch runs it, in f32; its weights still lie in the checkpoint."""

    model: ir.Model
    operators: dict[str, int]
    layer: LayerGraph
    values: tuple[ir.Value, ...]  # that hold the checkpoint's tensors


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """The same model in fewer, larger operators, still in f32."""

    model: ir.Model
    operators: dict[str, int]
    traced: TracedGraph


@dataclass(frozen=True, slots=True)
class QuantizedGraph:
    """The fused graph in the recipe's dtypes: what the backend gets."""

    model: ir.Model
    operators: dict[str, int]
    weights: dict[str, int]  # bytes by dtype
    layer: LayerGraph
    traced: TracedGraph


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


def require_libraries() -> None:
    """Raise `BuildError` where what only building needs is not installed."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(f"building needs {', '.join(missing)}, which serving does not: pip install 'plancast[build]'")


def require_device(recipe: Recipe) -> None:
    """Raise `BuildError` where parity is to run an engine that this machine cannot run."""
    if recipe.backend.name.startswith("tensorrt") and recipe.parity.enabled:
        from runtime.executors.segments.cuda import load_driver

        try:
            load_driver()
        except PlancastError as error:
            raise BuildError(
                f"parity runs the engine, and {error}; build without it: --set parity.enabled=false"
            ) from None


def pull(recipe: Recipe, progress: Progress) -> Checkpoint:
    """The recipe's model on disk. Raises `ZooError` where it cannot be had, `BuildError` where it is too short."""
    import zoo

    checkpoint = zoo.resolve(recipe.model, trust_remote_code=recipe.trust_remote_code, progress=progress)
    check_context(recipe, checkpoint.name, checkpoint.context_length)
    return checkpoint


def check_context(recipe: Recipe, name: str, length: int | None) -> None:
    """Raise `BuildError` where the recipe asks for more context than the model `name` was made for (None: unknown)."""
    asked = recipe.limits.max_context_len
    if length is not None and asked > length:
        raise BuildError(
            f"limits.max_context_len is {asked}, and {name} was made for {length} tokens; "
            f"lower it: --set limits.max_context_len={length}"
        )


def trace(
    checkpoint: Checkpoint, recipe: Recipe, dense: Mapping[str, NDArray[np.float32]] | None = None
) -> TracedGraph:
    """Trace the checkpoint, with `dense` in place of its own weights of these names.

    Raises `BuildError` where the model is of a kind that cannot be traced right.
    """
    from builder import trace as tracer

    model = tracer.trace(
        checkpoint,
        max_context_len=recipe.limits.max_context_len,
        trust_remote_code=recipe.trust_remote_code,
        task=recipe.task,
    )
    _replace(model, dense or {})
    values = tuple(model.graph.initializers.values())
    return TracedGraph(model, operator_counts(model), extract_layer(model), values)


def fuse(traced: TracedGraph, recipe: Recipe, progress: Progress) -> FusedGraph:
    """Rewrite the graph into fewer operators (`traced.model` is used up)."""
    from builder import passes

    model = passes.run_passes(traced.model, recipe, _teller(progress), passes=passes.fusing_passes())
    return FusedGraph(model, operator_counts(model), traced)


def quantize(
    fused: FusedGraph, recipe: Recipe, progress: Progress, prepared: PreparedWeights | None = None
) -> QuantizedGraph:
    """Bring the graph into the recipe's dtypes (`fused.model` is used up), with what was `prepared` for it."""
    from builder import passes

    model = passes.run_passes(fused.model, recipe, _teller(progress), passes=passes.precision_passes(prepared))
    return QuantizedGraph(model, operator_counts(model), weight_bytes(model), extract_layer(model), fused.traced)


def compile_engine(graph: QuantizedGraph, recipe: Recipe, folder: Path, progress: Progress) -> CompiledEngine:
    """Compile the graph with the recipe's backend into `folder` (`graph.model` is used up).

    Raises:
        BuildError: the backend cannot compile it.
    """
    backend = _backend(recipe)
    try:
        info = backend.compile_engine(graph.model, recipe, folder, progress)
        layout = backend.kv_layout(graph.model, recipe)
    except (PlancastError, RuntimeError, OSError) as error:
        # Libraries written in C++ say only that writing failed.
        if not is_out_of_space(error) and shutil.disk_usage(folder).free < _FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        _drop_weights(graph)
    traced = graph.traced
    return CompiledEngine(
        folder, info, layout, graph.operators, traced.operators, graph.weights, Graphs(traced.layer, graph.layer)
    )


def _replace(model: ir.Model, dense: Mapping[str, NDArray[np.float32]]) -> None:
    """Let initializers hold other values. A name that the graph does not have is a fault of whoever made it."""
    import onnx_ir as ir

    for name, array in dense.items():
        value = model.graph.initializers[name]
        value.const_value = ir.Tensor(array, name=name)


def _backend(recipe: Recipe) -> ModuleType:
    """The backend's module: `compile_engine` and `kv_layout`."""
    if recipe.backend.name == "torch":
        from builder.backends import torch

        return torch
    if recipe.backend.name == "tensorrt":
        from builder.backends import tensorrt

        return tensorrt
    if recipe.backend.name == "tensorrt_rtx":
        from builder.backends import tensorrt_rtx

        return tensorrt_rtx
    from builder.backends import openvino

    return openvino


def _teller(progress: Progress) -> Callable[[str], None]:
    return lambda name: progress.update(name, 0, None)


def _drop_weights(graph: QuantizedGraph) -> None:
    """Unmap the checkpoint's files. The graphs may live on: onnxscript's rewriter keeps the last one that it saw."""
    for value in (*graph.traced.values, *graph.model.graph.initializers.values()):
        value.const_value = None
    graph.model.graph.initializers.clear()
