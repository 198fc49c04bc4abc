"""Remove duplicates, dead nodes, casts and reshapes without effect; fold arithmetic on weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, well_formed
from builder.passes.graph import constant, dims, replace, scalar, weight
from builder.weights import lazy, static_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.recipe import Recipe

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}  # exactly: 1e-8 is an epsilon, not a 0

# What may be done to a weight once, before the engine is built (gemma's `1 + weight`), instead of in each step.
_WEIGHT_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Exp": np.exp,
}


class Tidy(GraphPass):
    """The graph without duplicates (cos and sin of each layer), dead nodes, no-op casts, reshapes and factors."""

    name = "tidy"
    requires = (well_formed, flat_attention)
    ensures = (well_formed, flat_attention)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        before = len(model.graph)
        for node in list(model.graph):
            _simplify(node)
        common.RemoveUnusedNodesPass()(model)
        for node in list(model.graph):
            _fold_weight(model, node)
        ir.passes.Sequential(
            common.DeduplicateInitializersPass(size_limit=1024),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
        )(model)
        return before - len(model.graph)


def _simplify(node: ir.Node) -> None:
    """Let the users of a node that changes nothing use its input; join reshapes of reshapes."""
    data = node.inputs[0] if node.inputs else None
    if data is None or not node.outputs:
        return
    output = node.outputs[0]
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Expand") and dims(data) == dims(output) is not None:
        replace(output, data)
    elif node.op_type == "Reshape":
        while (inner := data.producer()) is not None and inner.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
            data = inner.inputs[0]
            assert data is not None
        if dims(data) == dims(output) is not None:
            replace(output, data)
        elif _independent(node):
            node.replace_input_with(0, data)
    elif (node.op_type == "Cast" and node.attributes["to"].as_int() == data.dtype) or node.op_type == "Identity":
        if not (data.is_graph_input() and output.is_graph_output()):
            replace(output, data)
    elif node.op_type in _NEUTRAL:
        for kept, other in zip(node.inputs, node.inputs[::-1], strict=True):
            first = kept is data or node.op_type in ("Add", "Mul")
            same = kept is not None and dims(kept) == dims(output) is not None
            if kept is not None and first and same and scalar(other) == _NEUTRAL[node.op_type]:
                replace(output, kept)
                return


def _independent(reshape: ir.Node) -> bool:
    """Whether the target shape means the same for any input: constant, without a 0 that copies a dimension."""
    target = constant(reshape.inputs[1])
    return target is not None and not (target == 0).any()


def _fold_weight(model: ir.Model, node: ir.Node) -> None:
    """Arithmetic, a cast or a reshape of nothing but weights becomes a weight that is computed when it is read."""
    operands = [weight(value) for value in node.inputs]
    if node.domain or not operands or any(tensor is None for tensor in operands):
        return
    output = node.outputs[0]
    shape = dims(output)
    if shape is None or output.dtype is None or any(not isinstance(dim, int) for dim in shape):
        return
    if node.op_type in _WEIGHT_ARITHMETIC:
        compute = _WEIGHT_ARITHMETIC[node.op_type]
    elif node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        operands, compute = operands[:1], lambda array: array.reshape(shape)
    elif node.op_type == "Transpose" and len(shape) != 2:  # of two axes, it belongs to a product
        perm = node.attributes["perm"].as_ints()
        compute = lambda array: array.transpose(perm)  # noqa: E731
    elif node.op_type == "Cast" and output.dtype.is_floating_point():
        numpy_dtype = output.dtype.numpy()
        compute = lambda array: array.astype(numpy_dtype)  # noqa: E731
    else:
        return
    tensors = [tensor for tensor in operands if tensor is not None]
    largest = max((v for v in node.inputs if v is not None), key=lambda v: np.prod(static_shape(v), dtype=int))
    name = largest.name or "weight"
    tensor = lazy(name, output.dtype, static_shape(output), lambda: compute(*(t.numpy() for t in tensors)))
    output_name = f"{name}.{node.op_type.lower()}"
    while output_name in model.graph.initializers:
        output_name += "_"
    folded = ir.Value(name=output_name, type=output.type, shape=output.shape, const_value=tensor)
    model.graph.initializers[output_name] = folded
    replace(output, folded)
