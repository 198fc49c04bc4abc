"""Conditions on a graph, which passes require and ensure. Each says what is wrong, or returns None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.passes.graph import dims
from builder.tracing.signature import HIDDEN, OUTPUTS, TABLES, attention_nodes
from builder.tracing.translate import OPSET
from plugins.paged_attention.op import INPUTS, OP_TYPE

if TYPE_CHECKING:
    import onnx_ir as ir


def well_formed(model: ir.Model) -> str | None:
    """Opset 23; each value is made before it is used; the inputs and the output are those of an engine."""
    if model.opset_imports.get("") != OPSET:
        return f"the opset is {model.opset_imports.get('')}, not {OPSET}"
    known = {*model.graph.inputs, *model.graph.initializers.values()}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value not in known:
                return f"{node.op_type} {node.name!r} uses {value.name!r} before anything makes it"
        known.update(node.outputs)
    names = [value.name for value in model.graph.inputs]
    missing = [name for name in ("input_ids", "position_ids", "logits_rows", *TABLES) if name not in names]
    outputs = [value.name for value in model.graph.outputs]
    if missing or outputs not in [*([name] for name in OUTPUTS.values()), [OUTPUTS["generate"], HIDDEN]]:
        return f"the signature lacks {', '.join(missing) or 'its output'}"
    unmade = [value.name for value in model.graph.outputs if value not in known]
    return f"nothing makes the output {unmade[0]}" if unmade else None


def flat_attention(model: ir.Model) -> str | None:
    """Each attention node has query, key and value `[T, heads * size]`, caches and tables."""
    for node in attention_nodes(model):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        widths = (
            attributes["num_heads"] * attributes["head_size"],
            attributes["num_kv_heads"] * attributes["head_size"],
            attributes["num_kv_heads"] * attributes["v_head_size"],
        )
        for name, value, width in zip(INPUTS, node.inputs, widths, strict=False):
            if value is None or dims(value) != ("T", width):
                return f"layer {attributes['layer']}: {name} is {value and dims(value)}, not ['T', {width}]"
        if any(value is None for value in node.inputs[: len(widths) + 2 + len(TABLES)]):
            return f"layer {attributes['layer']} has no cache or no table"
    return None


def tokens_first(model: ir.Model) -> str | None:
    """Every activation lies tokens first: `T` (or `R`, the rows that want logits) is its first axis, and no other."""
    for node in model.graph:
        for value in node.outputs:
            shape = dims(value)
            if shape is not None and any(dim in ("T", "R") for dim in shape[1:]):
                return f"{node.op_type} makes {value.name} {list(shape)}"
    return None


def f32_activations(model: ir.Model) -> str | None:
    """What products, norms, attention and the head take and give is f32."""
    for node in model.graph:
        if node.op_type in ("MatMul", "Gemm", "RMSNormalization", "LayerNormalization", OP_TYPE):
            for value in (*node.inputs[:3], *node.outputs):
                dtype = value.dtype if value is not None else None
                if value is not None and dtype is not None and dtype.is_floating_point() and dtype.name != "FLOAT":
                    return f"{node.op_type} has {value.name} in {dtype.name}"
    output = model.graph.outputs[0]
    return None if output.dtype is not None and output.dtype.name == "FLOAT" else f"{output.name} are {output.dtype}"


def rows_before_head(model: ir.Model) -> str | None:
    """The product that makes the logits runs on `R` rows. (Hidden states need none after the rows are picked.)"""
    value: ir.Value | None = model.graph.outputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in ("MatMul", "Gemm"):
            data = node.inputs[0]
            shape = dims(data) if data is not None else None
            return None if shape and shape[0] == "R" else f"the head runs on {shape}"
        if node.op_type == "Gather" and (rows := node.inputs[1]) is not None and rows.name == "logits_rows":
            return None
        value = node.inputs[0]
    return None


def one_product_form(model: ir.Model) -> str | None:
    """No Gemm is left, and no product takes a weight as it is stored: a Transpose stands between."""
    for node in model.graph:
        if node.op_type == "Gemm" and not node.domain:
            return f"{node.outputs[0].name} is made by Gemm"
        if node.op_type == "MatMul" and (matrix := node.inputs[1]) is not None and matrix.is_initializer():
            return f"{matrix.name} is stored [in, out]"
    return None
