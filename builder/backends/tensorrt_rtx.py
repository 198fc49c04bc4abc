"""TensorRT-RTX: builds the segments between attention nodes for a list of GPUs, on a machine that needs none.

Its Python API takes no plugins, so the graph is cut at them (`split_at_plugins`), and what runs it calls segment,
kernel, segment on one stream. Networks are strongly typed: activations are f16 here, int4 and int8 weights stay as they
are behind their DequantizeLinear.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from builder.backends.kv_layout import layout_of
from builder.backends.leftovers import removing_new_files
from builder.backends.segment_kernels import compile_kernels
from builder.backends.segment_plan import ENGINE, cut, make_plan
from builder.backends.stripped import NAME as STRIPPED
from builder.backends.stripped import filled, read_stripped, strip_file, weights_of, write_stripped
from plugins.gpu.architectures import RTX_CAPABILITIES
from plugins.paged_attention.kv_formats import KvFormat
from runtime.errors import BuildError, PlancastError
from runtime.executors.segments.engines import Log
from runtime.executors.segments.engines import load_library as load
from runtime.executors.segments.plan import Segment, SegmentPlan
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.passes.split_at_plugins import Segment as Cut
    from builder.recipe import Recipe
    from zoo.progress import Progress

DEFAULT = ("SM86", "SM89", "SM120")


def compile_engine(model: ir.Model, recipe: Recipe, folder: Path, progress: Progress | None = None) -> BackendInfo:
    """Write the segments' engines, the kernels between them and the plan that joins both into `folder`.

    Raises:
        BuildError: TensorRT-RTX or Triton is missing, or one does not take its part. Nothing is left in `folder` then,
            nor by any other exception.
    """
    trt = load_library()
    capabilities = recipe.backend.compute_capabilities or DEFAULT
    with removing_new_files(folder):
        plan = build_plan(model, recipe, folder, capabilities, progress)
        (folder / ENGINE).write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
    return BackendInfo(
        name="tensorrt_rtx",
        version=trt.__version__,
        device=recipe.backend.device,
        properties={
            "compute": recipe.backend.compute,
            "compute_capabilities": " ".join(capabilities),
            "weights": "stripped" if recipe.backend.strip_weights else "inside",
        },
        engine=ENGINE,
    )


def kv_layout(model: ir.Model, recipe: Recipe) -> KvLayout:
    """The KV cache that the engine of `model` has, layer by layer: pages of `kv_formats.py`."""
    return layout_of(model, recipe, KvFormat.scale_bytes)


def build_plan(
    model: ir.Model, recipe: Recipe, folder: Path, capabilities: Sequence[str], progress: Progress | None = None
) -> SegmentPlan:
    """Build engines and kernels of `model` into `folder`, each for all `capabilities`, and describe them.

    Raises:
        BuildError: TensorRT-RTX or Triton is missing, or one does not take its part; with its own words.
    """
    segments, kernels = cut(model)
    engines = build_engines(segments, recipe, folder, capabilities, progress)
    if recipe.backend.strip_weights:
        cuts = {
            engine.file: strip_file(folder / engine.file, weights_of(segment.model))
            for engine, segment in zip(engines, segments, strict=True)
        }
        write_stripped(folder, cuts)
    if progress:
        progress.update("kernels", 0, None)
    return make_plan(segments, kernels, engines, compile_kernels(kernels, folder, capabilities))


def refit(model: ir.Model, source: Path, target: Path, hint: str) -> list[str]:
    """Write the engines of the artifact in `source` into `target`, the weights of `model` in them; returns their names.

    Raises:
        ArtifactError: the weights are not those that were taken out, with `hint`.
    """
    segments, _ = cut(model)
    files = read_stripped(source / STRIPPED, hint)
    for (name, stripped), segment in zip(files.items(), segments, strict=True):
        (target / name).write_bytes(filled(source / name, stripped, weights_of(segment.model).get, hint))
    return list(files)


def build_engines(
    segments: Sequence[Cut], recipe: Recipe, folder: Path, capabilities: Sequence[str], progress: Progress | None = None
) -> list[Segment]:
    """Build an engine of each segment into `folder`, each for all `capabilities`.

    Raises:
        BuildError: TensorRT-RTX is missing or does not take a segment; with its own words.
    """
    unknown = sorted(set(capabilities) - set(RTX_CAPABILITIES))
    if unknown or not capabilities:
        raise BuildError(
            f"TensorRT-RTX builds for {', '.join(RTX_CAPABILITIES)}, not for {', '.join(unknown) or 'nothing'}"
        )
    trt = load_library()
    log = Log(trt)
    engines = []
    for i, segment in enumerate(segments):
        if progress:
            progress.update("segments", i, len(segments))
        engines.append(_build(trt, log, segment.model, recipe, folder / f"segment-{i:03d}.engine", capabilities))
    return engines


def load_library() -> Any:
    """The module of TensorRT-RTX. Raises `BuildError` where it is not installed."""
    try:
        return load("tensorrt_rtx")
    except PlancastError as error:
        raise BuildError(str(error)) from None


def _build(trt: Any, log: Any, model: ir.Model, recipe: Recipe, path: Path, capabilities: Sequence[str]) -> Segment:
    import onnx_ir as ir

    begin = time.perf_counter()
    builder = trt.Builder(log.logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log.logger)
    # Weights come from memory: a segment is small, and the proto is gone before the engine is built.
    if not parser.parse(ir.serde.serialize_model(model).SerializeToString()):
        errors = "; ".join(str(parser.get_error(i).desc()) for i in range(parser.num_errors))
        raise BuildError(f"{path.stem}: TensorRT-RTX does not read the graph: {errors or log.last}")
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(capabilities)
    for i, name in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), i)
    profile = builder.create_optimization_profile()
    for value in model.graph.inputs:
        least, usual, most = ([_extent(dim, recipe, i) for dim in value.shape or ()] for i in range(3))
        profile.set_shape(value.name, least, usual, most)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"{path.stem}: TensorRT-RTX does not build the segment: {log.last}")
    data = bytes(engine)
    path.write_bytes(data)
    inputs, outputs = (tuple(v.name or "" for v in values) for values in (model.graph.inputs, model.graph.outputs))
    seconds = round(time.perf_counter() - begin, 3)
    return Segment(path.name, inputs, outputs, network.num_layers, len(data), seconds)


def _extent(dim: Any, recipe: Recipe, which: int) -> int:
    """The smallest, usual and largest length of a dimension: T tokens, or R rows (verification wants all logits)."""
    if isinstance(dim, int):
        return dim
    largest = recipe.limits.max_num_batched_tokens
    return (1, min(64, largest), largest)[which]


def inspect_segment(path: Path) -> str:
    """TensorRT-RTX's own account of an engine, as text. Needs no GPU where the library gives it without one.

    Raises:
        BuildError: the engine does not load here.
    """
    trt = load_library()
    log = Log(trt)
    engine = trt.Runtime(log.logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise BuildError(f"{path}: the engine does not load here: {log.last}")
    return engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE)
