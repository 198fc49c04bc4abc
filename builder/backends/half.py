"""A segment's values in f16, for compilers of strongly typed networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def to_half(model: ir.Model) -> None:
    """Bring a segment's f32 values into f16, in place; logits stay f32, and so does what rotary tables come from.

    Weights are read one at a time, when the model is serialized.
    """
    import onnx_ir as ir

    from builder.weights import cast
    from plugins.rope.angles import angle_nodes, cast_uses, used_only_by

    half, wide = ir.DataType.FLOAT16, (ir.DataType.FLOAT, ir.DataType.BFLOAT16)
    exact = angle_nodes(model)

    for value in (*model.graph.initializers.values(), *model.graph.inputs):
        if value.dtype not in wide or used_only_by(value, exact):
            continue
        value.dtype = half
        if value.const_value is not None:
            value.const_value = cast(value.const_value, half)
            value.const_value.name = value.name  # type: ignore[misc]
    for node in list(model.graph):
        if node in exact:
            for value in node.outputs:
                cast_uses(value, half, [use for use in value.uses() if use.node not in exact])
            continue
        if node.op_type == "Cast" and node.attributes["to"].as_int() in wide:
            node.attributes["to"] = ir.AttrInt64("to", half)
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            if tensor.dtype in wide:
                node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(tensor.numpy().astype("float16")))
        for value in node.outputs:
            if value.dtype in wide:
                value.dtype = half
    for i, value in enumerate(model.graph.outputs):
        if value.name == "logits":
            value.name = "logits_f16"
            node = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT})
            (logits,) = node.outputs
            logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, value.shape
            model.graph.append(node)
            model.graph.outputs[i] = logits
