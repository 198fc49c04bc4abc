"""A graph as engines and kernels: what TensorRT or TensorRT-RTX compiles, what Triton compiles, and the plan that joins
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.backends.half import to_half
from builder.backends.segment_kernels import Kernels, plan_kernels
from builder.passes.split_at_plugins import Segment, split_at_plugins
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import INPUTS
from runtime.errors import BuildError
from runtime.executors.sampling_blocks import SAMPLE, SCORE, VERIFY
from runtime.executors.segments.plan import FORMAT, ROWS, TOKENS, Kernel, SegmentPlan, Value
from runtime.executors.segments.plan import Segment as SegmentInfo

if TYPE_CHECKING:
    import onnx_ir as ir

ENGINE = "segments.json"  # the plan's file, which is what a manifest calls the engine
_DTYPES = {"FLOAT16": "f16", "BFLOAT16": "bf16", "FLOAT": "f32", "INT32": "i32", "INT64": "i64"}


def cut(model: ir.Model) -> tuple[list[Segment], Kernels]:
    """The segments of `model` in f16 (it is changed on the way), and the kernels between them.

    Raises:
        BuildError: no chain, or an attention node that the kernels do not compute.
    """
    _constants_by_nodes(model)
    segments = split_at_plugins(model)
    for segment in segments:
        to_half(segment.model)
    return segments, plan_kernels(attention_nodes(model))


def make_plan(
    segments: list[Segment], kernels: Kernels, infos: list[SegmentInfo], compiled: dict[str, Kernel]
) -> SegmentPlan:
    """What the executor reads. `infos`: the segments' files; `compiled`: the kernels with theirs."""
    values: dict[str, Value] = {}
    for segment in segments:
        for value in segment.model.graph.outputs:
            values[value.name or ""] = _value(value, value.dtype)
    for layer, segment in zip(kernels.layers, segments, strict=False):
        assert segment.attention is not None
        query = values[layer.query]
        width = layer.num_heads * segment.attention.attributes["v_head_size"].as_int()
        values[layer.output] = Value(query.dtype, (TOKENS, width))
    return SegmentPlan(
        format=FORMAT, values=values, segments=tuple(infos), attentions=kernels.layers, kernels=compiled,
        copies=kernels.copies, sample=SAMPLE, score=SCORE, verify=VERIFY,
    )  # fmt: skip


def make_engine_plan(
    graph: ir.Model, kernels: Kernels, info: SegmentInfo, compiled: dict[str, Kernel], max_blocks: int
) -> SegmentPlan:
    """The same of one engine that attends itself. `graph`: with its caches as pages, of up to `max_blocks` blocks."""
    caches = {}
    for value in graph.graph.inputs:
        part, _, layer = (value.name or "").partition(".")
        if part in ("key_cache", "value_cache"):
            caches[int(layer), part] = tuple(int(str(dim)) for dim in list(value.shape or ())[1:])
    return SegmentPlan(
        format=FORMAT, values={value.name or "": _value(value, value.dtype) for value in graph.graph.outputs},
        segments=(info,), attentions=(), kernels=compiled, copies=kernels.copies, sample=SAMPLE, score=SCORE,
        verify=VERIFY, caches={f"{part}.{layer}": caches[layer, part] for layer, part in sorted(caches)},
        max_blocks=max_blocks,
    )  # fmt: skip


def _value(value: ir.Value, dtype: Any) -> Value:
    dims = []
    for dim in value.shape or ():
        if not isinstance(dim, int) and str(dim) not in (TOKENS, ROWS):
            raise BuildError(f"{value.name} has the dimension {dim}, which neither tokens nor rows of logits give")
        dims.append(dim if isinstance(dim, int) else str(dim))
    if dtype is None or dtype.name not in _DTYPES:
        raise BuildError(f"{value.name} of type {dtype} cannot cross from one segment to the next")
    return Value(_DTYPES[dtype.name], tuple(dims))


def _constants_by_nodes(model: ir.Model) -> None:
    """Weights that attention nodes take themselves (sinks, slopes) come out of the segment before them."""
    import onnx_ir as ir

    for node in attention_nodes(model):
        for i, value in enumerate(node.inputs):
            if value is None or not value.is_initializer() or INPUTS[i] not in ("sinks", "alibi_slopes"):
                continue
            copy = ir.node("Identity", [value])
            (result,) = copy.outputs
            result.name = f"{value.name}.layer{node.attributes['layer'].as_int()}"
            result.type, result.shape = value.type, value.shape
            node.replace_input_with(i, result)
            assert node.graph is not None
            node.graph.insert_before(node, copy)
