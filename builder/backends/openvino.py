"""Compiles a lowered graph with OpenVINO: ONNX -> IR (the portable form) -> a compiled form beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from builder.backends.kv_layout import layout_of
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import INPUTS
from runtime.errors import BuildError
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe
    from zoo.progress import Progress

ENGINE = "engine.xml"
WEIGHTS = "engine.bin"  # what ENGINE refers to, by its name alone


def compile_engine(model: ir.Model, recipe: Recipe, folder: Path, progress: Progress | None = None) -> BackendInfo:
    """Write the engine of `model` into `folder`: the IR, and the compiled form where recipe and machine allow it.

    Weights are stored as the graph has them: bf16, f16 and int8 stay so. They are read from the model one at a time; on
    the way the disk holds them twice. The compiled form takes the native library (`plugins.native`); without it, and
    with a note to `progress`, the IR is compiled at each load.

    Raises:
        BuildError: the graph holds what OpenVINO cannot compute. Nothing is left in `folder` then, nor by any other
            exception.
    """
    import openvino as ov

    from builder.backends.openvino_compiled import BLOB, PLAN, write_compiled_form
    from plugins.block import op as block
    from plugins.linear import op as linear
    from plugins.native import find_native
    from runtime.executors.openvino_model import OpenVINOEngine, reason

    native = find_native()
    own_attention = uses_own_attention(model, recipe)
    _check_gathers(model)
    properties = engine_properties(recipe, own_attention=own_attention)
    if recipe.backend.blob and not native and progress:
        progress.note("no compiled form: our C++ operators are not built here; each load compiles the portable form")
    try:
        _write_ir(model, folder, native if own_attention else None)
        engine, form = OpenVINOEngine(native, properties, own_linear=recipe.backend.linear == "native"), None
        try:
            if recipe.backend.blob and native:
                form = write_compiled_form(engine, folder / ENGINE, native, progress)
            else:
                engine.compile_ir(folder / ENGINE)
        except RuntimeError as error:
            raise BuildError(f"OpenVINO does not compile the graph: {reason(error)}") from error
    except BaseException:
        for name in (ENGINE, WEIGHTS, PLAN, BLOB):
            (folder / name).unlink(missing_ok=True)
        raise
    plugins = {linear.OP_TYPE: linear.VERSION} if engine.lowered else {}
    if engine.blocks:
        plugins[block.OP_TYPE] = block.VERSION
    return BackendInfo(
        name="openvino",
        version=ov.get_version(),
        properties=properties,
        plugins=plugins,
        engine=ENGINE,
        plan=PLAN if form == PLAN else None,
        blob=BLOB if form == BLOB else None,
    )


def uses_own_attention(model: ir.Model, recipe: Recipe) -> bool:
    """Whether our C++ kernels attend, rather than OpenVINO's operation.

    Raises:
        BuildError: neither can compute a layer; says why.
    """
    from plugins.native import find_native
    from plugins.paged_attention import native, openvino

    own, other = None, None  # why not
    if recipe.backend.attention != "native":
        own = "backend.attention is openvino"
    elif find_native() is None:
        own = "our C++ operators, which could, are not built here: python -m plugins.native says why"
    for node in attention_nodes(model):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        given = {name for name, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
        where = f"layer {attributes['layer']}: "
        if own is None and (reason := native.refusal(attributes)):
            own = where + reason
        if other is None and (reason := openvino.refusal(attributes, given)):
            other = where + reason
    if own is not None and other is not None:
        raise BuildError(f"{other} ({own})" if own.startswith("our") else f"{other}; {own}")
    return own is None


def kv_layout(model: ir.Model, recipe: Recipe) -> KvLayout:
    """The KV cache that the engine of `model` has, layer by layer."""
    from plugins.paged_attention.kv_formats import KvFormat
    from plugins.paged_attention.openvino import KV_SCALE_BYTES

    if uses_own_attention(model, recipe):
        return layout_of(model, recipe, KvFormat.scale_bytes)
    return layout_of(model, recipe, lambda form, _size: KV_SCALE_BYTES[form.dtype])


def engine_properties(recipe: Recipe, *, own_attention: bool = False) -> dict[str, str]:
    """Every property of OpenVINO that changes what the engine computes or how, none left to its default.

    The number of threads is the executor's to set.

    Raises:
        BuildError: a dtype, or a pair of them, that OpenVINO's paged attention does not compute.
    """
    from plugins.paged_attention.openvino import BLOCK_SIZE, KV_DTYPES, KV_PRECISIONS

    compute, kv = recipe.backend.compute, recipe.kv
    allowed = KV_DTYPES.get(compute)
    if allowed is None:
        raise BuildError(f"backend.compute {compute} is not computed by OpenVINO; allowed: {', '.join(KV_DTYPES)}")
    fits = kv.key == kv.value and kv.key in allowed
    if not fits and not own_attention:
        raise BuildError(
            f"kv.key {kv.key} with kv.value {kv.value} is not computed by OpenVINO in {compute}; allowed, the same for "
            f"both: {', '.join(allowed)}"
        )
    if kv.block_size != BLOCK_SIZE:
        raise BuildError(f"kv.block_size {kv.block_size} is impossible with OpenVINO, which has {BLOCK_SIZE} alone")
    # Our own attention does not look at these, and OpenVINO's takes its place where it is not built.
    key, value = (KV_PRECISIONS[part if fits else compute] for part in (kv.key, kv.value))
    return {
        "INFERENCE_PRECISION_HINT": compute,
        "EXECUTION_MODE_HINT": "PERFORMANCE",
        "KV_CACHE_PRECISION": key,
        "KEY_CACHE_PRECISION": key,
        "VALUE_CACHE_PRECISION": value,
        # By token, a cell depends on its own token alone, and so survives a rollback.
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "VALUE_CACHE_QUANT_MODE": "BY_TOKEN",
        "KEY_CACHE_GROUP_SIZE": "0",
        "VALUE_CACHE_GROUP_SIZE": "0",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(recipe.backend.dynamic_quantization_group_size or 0),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        # Pinned threads fight with whatever else runs on the machine.
        "ENABLE_CPU_PINNING": "NO",
    }


def _check_gathers(model: ir.Model) -> None:
    """OpenVINO takes an embedding's scales to be one a row, whatever the graph says, and reads past their end."""
    for node in model.graph:
        table = node.inputs[0] if node.op_type == "Gather" else None
        weight = table.producer() if table is not None else None
        if table is None or weight is None or weight.op_type != "DequantizeLinear":
            continue
        axis = weight.attributes["axis"].as_int() if "axis" in weight.attributes else 1
        scale = weight.inputs[1]
        if axis != 0 and scale is not None and scale.shape is not None and len(scale.shape):
            raise BuildError(
                f"{table.name}: an embedding with scales along axis {axis}; OpenVINO reads such a table wrongly: "
                "quantize it with a scale a row (axis 0)"
            )


def _write_ir(model: ir.Model, folder: Path, own_attention: Path | None) -> None:
    """ONNX with external data, read by OpenVINO's front end, saved as IR."""
    import onnx_ir as ir
    import openvino as ov

    from builder.backends.openvino_rope import write_out_rope
    from plugins.paged_attention.openvino import conversion_extension
    from runtime.executors.openvino_model import reason

    core = ov.Core()
    core.add_extension(conversion_extension(own_attention))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".onnx-") as scratch:
        path = Path(scratch) / "model.onnx"
        write_out_rope(model)
        ir.save(model, path, external_data="model.onnx.data")
        try:
            converted = core.read_model(path)
        except RuntimeError as error:
            raise BuildError(f"OpenVINO does not read the graph: {reason(error)}") from error
        ov.save_model(converted, folder / ENGINE, compress_to_fp16=False)
