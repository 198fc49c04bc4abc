"""TensorRT 11: one engine of the graph with our plugins in it, built on a machine with the GPU that it is for.

The plugins' kernels are compiled ahead of time by Triton and lie in the engine as PTX; those that sample and copy
blocks lie beside it. `runtime/executors/segments/` runs both, as a plan of one segment. Where TensorRT's library is not
installed, everything up to it is done and one line says what is missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from builder.backends.kv_layout import layout_of
from builder.backends.leftovers import removing_new_files
from builder.backends.segment_kernels import compile_kernels, side_kernels
from builder.backends.segment_plan import ENGINE, make_engine_plan
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.kv_formats import KvFormat
from runtime.errors import BuildError, PlancastError
from runtime.executors.segments.engines import Log
from runtime.executors.segments.engines import load_library as load
from runtime.executors.segments.plan import Segment
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe
    from zoo.progress import Progress

PLAN = "engine.plan"  # TensorRT's own file
_BLOCKS = (1, 4096, 1 << 20)  # of the KV pool


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        strip_weights: leave them out, to be put in by a refit.
        refit: weights may be exchanged.
        weight_streaming: weights may stay in host memory.
        timing_cache: a file of measured tactics, read and written.
        python_plugins: plugins launched by Python when the engine runs (`tensorrt_jit.py`), for development.
        workspace: bytes of device memory that tactics may use; None: all.
    """

    strip_weights: bool = False
    refit: bool = False
    weight_streaming: bool = False
    timing_cache: Path | None = None
    workspace: int | None = None
    python_plugins: bool = False

    @classmethod
    def of(cls, recipe: Recipe, **others: Any) -> EngineOptions:
        """What the recipe says, and `others`."""
        backend = recipe.backend
        return cls(strip_weights=backend.strip_weights, weight_streaming=backend.weight_streaming, **others)


def compile_engine(model: ir.Model, recipe: Recipe, folder: Path, progress: Progress | None = None) -> BackendInfo:
    """Build the engine of `model` into `folder`, for the one architecture that the recipe names.

    Raises:
        BuildError: TensorRT is missing, of another version or without the GPU, or does not take the graph. Nothing is
            left in `folder` then, nor by any other exception.
    """
    (capability,) = recipe.backend.compute_capabilities
    graph = plugin_graph(model, int(capability.removeprefix("SM")))
    if progress:
        progress.update("kernels", 0, None)
    compile_plugins(graph)
    with removing_new_files(folder):
        kernels = side_kernels(attention_nodes(model))
        compiled = compile_kernels(kernels, folder, [capability])
        trt = load_library()
        require_gpu(capability)
        begin, path = time.perf_counter(), folder / PLAN
        layers = build_engine(trt, graph, recipe, path, EngineOptions.of(recipe))
        info = engine_info(graph, layers, path.stat().st_size, time.perf_counter() - begin)
        plan = make_engine_plan(graph, kernels, info, compiled, _BLOCKS[-1])
        (folder / ENGINE).write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
    return BackendInfo(
        name="tensorrt",
        version=trt.__version__,
        device=recipe.backend.device,
        properties={
            "compute": recipe.backend.compute,
            "compute_capabilities": capability,
            "weights": "stripped" if recipe.backend.strip_weights else "inside",
        },
        engine=ENGINE,
    )


def engine_info(graph: ir.Model, layers: int = 0, size: int = 0, seconds: float = 0.0) -> Segment:
    """The engine of `graph` as the plan says it: its tensors, layers, bytes, and seconds to build."""
    inputs, outputs = (tuple(v.name or "" for v in values) for values in (graph.graph.inputs, graph.graph.outputs))
    return Segment(PLAN, inputs, outputs, layers, size, round(seconds, 3))


def kv_layout(model: ir.Model, recipe: Recipe) -> KvLayout:
    """The KV cache that the engine of `model` has, layer by layer: pages of `kv_formats.py`."""
    return layout_of(model, recipe, KvFormat.scale_bytes)


def plugin_graph(model: ir.Model, capability: int) -> ir.Model:
    """A copy of `model` in f16, its attention as plugin nodes for compute capability `capability` (90 for SM90).

    Raises:
        BuildError: an attention node that the plugins do not compute.
    """
    from builder.backends.half import to_half
    from builder.passes.attention_plugins import replace_attention

    graph = model.clone()
    to_half(graph)
    replace_attention(graph, capability)
    for value in [value for value in graph.graph.inputs if not value.uses()]:
        graph.graph.inputs.remove(value)  # max_context_len, which no plugin takes
    return graph


def compile_plugins(graph: ir.Model) -> int:
    """Compile every kernel that the graph's plugins launch, as TensorRT will ask for it; returns how many there are.

    Triton keeps them, so TensorRT's own asking takes no time.

    Raises:
        BuildError: Triton is missing, or a kernel does not compile.
    """
    try:
        from plugins.paged_attention.tensorrt import compile_node
    except ImportError as error:
        raise BuildError(
            f"the plugins' kernels need {error.name}, which is not installed: pip install 'plancast[tensorrt]'"
        ) from None
    from plugins.paged_attention.tensorrt_launch import PLUGINS

    done = set()
    for node in graph.graph:
        if node.op_type not in PLUGINS:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        kinds = [value.dtype.name if value is not None and value.dtype is not None else "" for value in node.inputs]
        key = (node.op_type, *sorted(attributes.items()), *kinds)
        if key in done:
            continue
        done.add(key)
        try:
            compile_node(node.op_type, attributes, kinds)
        except Exception as error:  # Triton raises many kinds
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise BuildError(f"the plugin {node.op_type} does not compile: {reason[0]}") from error
    return len(done)


def load_library() -> Any:
    """The module of TensorRT 11. Raises `BuildError` that says what was found and what to install."""
    try:
        return load("tensorrt")
    except PlancastError as error:
        raise BuildError(str(error)) from None


def require_gpu(capability: str) -> None:
    """Raise `BuildError` unless this machine's GPU is of `capability`: TensorRT measures its tactics on it."""
    from runtime.executors.segments.cuda import call, load_driver

    try:
        driver = load_driver("tensorrt")
        kind = driver.CUdevice_attribute
        device = call(driver, "cuDeviceGet", 0)
        major, minor = (
            call(
                driver, "cuDeviceGetAttribute", getattr(kind, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device
            )
            for part in ("MAJOR", "MINOR")
        )
    except PlancastError as error:
        raise BuildError(f"TensorRT builds an engine on the GPU that it is for ({capability}), and {error}") from None
    found = f"SM{10 * major + minor}"
    if found != capability:
        raise BuildError(
            f"TensorRT builds an engine on the GPU that it is for ({capability}), and the one here is {found}: "
            f"--set backend.compute_capabilities=[{found}]"
        )


def define_network(trt: Any, builder: Any, graph: ir.Model, log: Log, *, python_plugins: bool = False) -> Any:
    """The network of `graph`, whose plugin nodes are our plugins, compiled ahead of time or launched by Python.

    Raises:
        BuildError: the parser does not read it; with its own words.
    """
    import onnx_ir as ir

    kind = "JIT" if python_plugins else "AOT"
    # TensorRT-RTX's library, which tests read networks with, has no such flag.
    flag = getattr(trt.NetworkDefinitionCreationFlag, f"PREFER_{kind}_PYTHON_PLUGINS", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    if network is None:
        raise BuildError(f"TensorRT makes no network: {log.last}")
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse(ir.serde.serialize_model(graph).SerializeToString()):
        errors = "; ".join(str(parser.get_error(i).desc()) for i in range(parser.num_errors))
        raise BuildError(f"TensorRT does not read the graph (after {network.num_layers} layers): {errors or log.last}")
    return network


def build_engine(trt: Any, graph: ir.Model, recipe: Recipe, path: Path, options: EngineOptions) -> int:
    """Build the engine of `graph` (see `plugin_graph`) for this machine's GPU into `path`; returns its layers.

    Raises:
        BuildError: TensorRT does not take the graph; with its own words.
    """
    from plugins.paged_attention.tensorrt import register_plugins

    register_plugins(trt.__name__)
    log = Log(trt)
    builder = trt.Builder(log.logger)
    network = define_network(trt, builder, graph, log, python_plugins=options.python_plugins)
    config = configure(trt, builder, graph, recipe, options)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"TensorRT does not build the engine: {log.last}")
    path.write_bytes(bytes(engine))
    if options.timing_cache is not None:
        options.timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
    return network.num_layers


def refit(model: ir.Model, source: Path, target: Path, hint: str) -> list[str]:
    """Write the engine of the artifact in `source` into `target`, the weights of `model` in it; returns its name.

    TensorRT's own refitter does it, on the GPU that the engine is for.

    Raises:
        BuildError: TensorRT or the GPU is missing, or it does not take the weights; with its own words and `hint`.
    """
    trt = load_library()
    import onnx_ir as ir

    from plugins.paged_attention.tensorrt import register_plugins

    register_plugins(trt.__name__)
    log = Log(trt)
    engine = trt.Runtime(log.logger).deserialize_cuda_engine((source / PLAN).read_bytes())
    if engine is None:
        raise BuildError(f"{source / PLAN}: does not load here: {log.last}")
    refitter = trt.Refitter(engine, log.logger)
    # The plugins' kernels are in the engine: the nodes are read for the weights around them, whatever the GPU.
    proto = ir.serde.serialize_model(plugin_graph(model, 80)).SerializeToString()
    if not trt.OnnxParserRefitter(refitter, log.logger).refit_from_bytes(proto) or not refitter.refit_cuda_engine():
        missing = ", ".join(list(refitter.get_missing_weights())[:3])
        raise BuildError(f"TensorRT does not take the weights ({missing or log.last}); {hint}")
    config = engine.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    (target / PLAN).write_bytes(bytes(engine.serialize_with_config(config)))
    return [PLAN]


def configure(trt: Any, builder: Any, model: ir.Model, recipe: Recipe, options: EngineOptions) -> Any:
    """The builder's configuration: flags, memory, timing cache, and a profile each for decode and for prefill.

    Raises:
        BuildError: a profile that the library refuses.
    """
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the inspector
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)  # WriteKV writes into its inputs
    flags = {"STRIP_PLAN": options.strip_weights, "WEIGHT_STREAMING": options.weight_streaming}
    flags["REFIT_IDENTICAL" if options.strip_weights and not options.refit else "REFIT"] = (
        options.strip_weights or options.refit
    )
    for name, wanted in flags.items():
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if options.timing_cache is not None:
        known = options.timing_cache.read_bytes() if options.timing_cache.exists() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    for extents in profiles(model, recipe):
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in extents.items():
            profile.set_shape(name, least, usual, most)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError("TensorRT refuses an optimization profile: " + ", ".join(extents))
    return config


Extents = dict[str, tuple[list[int], list[int], list[int]]]


def profiles(model: ir.Model, recipe: Recipe) -> list[Extents]:
    """Smallest, usual and largest shape of each input: for steps that decode, and for those that read prompts."""
    limits = recipe.limits
    blocks = -(-limits.max_context_len // recipe.kv.block_size)
    found = []
    for usual, most in (
        (min(16, limits.max_num_seqs), limits.max_num_seqs),
        (limits.max_num_batched_tokens, limits.max_num_batched_tokens),
    ):
        sequences = (1, min(usual, limits.max_num_seqs), min(most, limits.max_num_seqs))
        bounds = tuple(count + 1 for count in sequences)
        lengths = {
            "T": (1, usual, most), "R": (1, sequences[1], most), "past_lens": sequences, "query_starts": bounds,
            "block_starts": bounds, "block_ids": (1, sequences[1] * blocks, sequences[2] * blocks),
        }  # fmt: skip
        extents: Extents = {}
        for value in model.graph.inputs:
            name = value.name or ""
            shapes: tuple[list[int], list[int], list[int]] = ([], [], [])
            for dim in value.shape or ():
                # What is left is the number of blocks, which the memory decides when the engine is loaded.
                known = (dim,) * 3 if isinstance(dim, int) else lengths.get(name) or lengths.get(str(dim))
                for shape, size in zip(shapes, known or _BLOCKS, strict=True):
                    shape.append(size)
            extents[name] = shapes
        found.append(extents)
    return found
