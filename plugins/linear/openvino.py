"""`plancast::Linear` on OpenVINO: matrix products with constant weights become our C++ operation.

The operation lives in the native library: a model that holds it is compiled, read and imported by a core that has the
library as an extension (`plugins.native`).
"""

from __future__ import annotations

from pathlib import Path

import openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from plugins.linear.op import OP_TYPE, Activations, Weight, pack
from plugins.linear.openvino_weights import minima_term, product_weight


def lower_linear(model: ov.Model, native: Path, *, activations: Activations = "int16", compute: str = "f32") -> int:
    """Replace each product with a constant weight that the kernels know by `Linear`, in place.

    Known are: int8, uint8, int4 and uint4 constants behind `(q - zero) * scale` with a scale a channel or a group of a
    multiple of 32 columns, whatever reshapes, transposes and conversions stand between (all forms of ONNX's
    DequantizeLinear), also with a term `MatMul(sums of x over each group, minima)` added to the product; and bf16
    constants.

    Args:
        model: as read from IR or ONNX.
        native: the library that brings the operation.
        activations: how int8 weights without minima or zero points get theirs: `int16` or `int8`; the other integer
            weights always get `int8`.
        compute: what the model computes in. bf16 weights get activations in bf16 if that is bf16, else the sum of two.

    Returns:
        How many products there were.
    """
    factory = NodeFactory()
    factory.add_extension(str(native))
    lowered = 0
    for product in [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]:
        weight = product_weight(product)
        if weight is None:
            continue
        replaced, minimum = product, minima_term(product, weight)
        if minimum is not None:
            replaced, weight = minimum
        _replace(replaced, _linear(factory, product, weight, _activations(weight, activations, compute)))
        lowered += 1
    return lowered


def _activations(weight: Weight, wanted: Activations, compute: str) -> Activations:
    if weight.kind == "bf16":
        return "bf16" if compute == "bf16" else "bf16x2"
    return wanted if weight.kind == "int8" and weight.low == "none" else "int8"


def _linear(factory: NodeFactory, product: ov.Node, weight: Weight, activations: Activations) -> ov.Output:
    x = product.input_value(0)
    if x.get_element_type() != ov.Type.f32:
        x = ops.convert(x, ov.Type.f32).output(0)
    attributes = {
        "kind": weight.kind,
        "activations": activations,
        "channels": weight.channels,
        "columns": weight.columns,
        "group": weight.group,
        "f16_scale": weight.f16_scale,
        "low": weight.low,
    }
    return factory.create(OP_TYPE, [x, ops.constant(pack(weight)).output(0)], attributes).output(0)


def _replace(node: ov.Node, result: ov.Output) -> None:
    """Let the users of `node` use `result`, in the node's own dtype and under its names."""
    result.get_node().set_friendly_name(node.get_friendly_name())
    if node.get_output_element_type(0) != ov.Type.f32:
        result = ops.convert(result, node.get_output_element_type(0)).output(0)
    result.set_names(node.output(0).get_names())
    for target in node.output(0).get_target_inputs():
        target.replace_source_output(result)
