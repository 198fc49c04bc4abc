"""`plancast::Linear` on OpenVINO: matrix products with int8 weights become our C++ operation.

The operation lives in the native library: a model that holds it is compiled, read and imported by a core that has the
library as an extension (`plugins.native`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from plugins.linear.op import OP_TYPE, pack_weight


class Int8Weight(NamedTuple):
    """A weight as the graph holds it: int8 [N, K] and a scale f32 [N] an output channel."""

    values: NDArray[np.int8]
    scale: NDArray[np.float32]


def lower_linear(model: ov.Model, native: Path) -> int:
    """Replace each product with a constant int8 weight by `Linear`, in place. Returns how many there were.

    A product qualifies when its weight is `Convert(int8 constant) * scale`, symmetric, one scale an output channel.
    `native` is the library that brings the operation.
    """
    factory = NodeFactory()
    factory.add_extension(str(native))
    products = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    lowered = 0
    for product in products:
        weight = int8_weight(product)
        if weight is None:
            continue
        x = product.input_value(0)
        if x.get_element_type() != ov.Type.f32:
            x = ops.convert(x, ov.Type.f32).output(0)
        packed = ops.constant(pack_weight(weight.values)).output(0)
        node = factory.create(OP_TYPE, [x, packed, ops.constant(weight.scale).output(0)])
        node.set_friendly_name(product.get_friendly_name())
        result = node.output(0)
        if product.get_output_element_type(0) != ov.Type.f32:
            result = ops.convert(result, product.get_output_element_type(0)).output(0)
        result.set_names(product.output(0).get_names())
        for target in product.output(0).get_target_inputs():
            target.replace_source_output(result)
        lowered += 1
    return lowered


def int8_weight(product: ov.Node) -> Int8Weight | None:
    """The int8 weight of a MatMul's second input; None where it is anything else."""
    attributes = product.get_attributes()
    if attributes["transpose_a"]:
        return None
    node = product.input_value(1).get_node()
    transposed = bool(attributes["transpose_b"])  # [N, K] rather than [K, N]
    while (
        node.get_type_name() in ("Transpose", "Convert")
        and node.input_value(0).get_node().get_type_name() != "Constant"
    ):
        transposed ^= node.get_type_name() == "Transpose"
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return None
    convert, scale = (node.input_value(i).get_node() for i in range(2))
    if convert.get_type_name() != "Convert":
        return None
    values = convert.input_value(0).get_node()
    shape = tuple(scale.get_output_partial_shape(0).get_shape()) if scale.get_output_partial_shape(0).is_static else ()
    while scale.get_type_name() in ("Convert", "Reshape"):  # of half precision, of a vector to a column
        scale = scale.input_value(0).get_node()
    if values.get_type_name() != "Constant" or scale.get_type_name() != "Constant":
        return None
    if values.get_element_type() != ov.Type.i8 or len(values.get_output_shape(0)) != 2:
        return None
    array = np.asarray(values.data)
    array = array if transposed else array.T
    channels = np.asarray(scale.data, np.float32).reshape(-1)
    axis = int(not transposed)  # of the channels, in the shape as stored
    if channels.size != array.shape[0] or shape != tuple(channels.size if i == axis else 1 for i in range(2)):
        return None
    return Int8Weight(np.ascontiguousarray(array), channels)
