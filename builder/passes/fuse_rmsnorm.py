"""Written-out norms become `RMSNormalization` (opset 23), or `LayerNormalization` where a mean is taken off."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import tokens_first, well_formed
from builder.passes.graph import Editor, constant, dims, made_by, only_user, replace, scalar, weight

if TYPE_CHECKING:
    from builder.recipe import Recipe


class _Norm(NamedTuple):
    data: ir.Value
    epsilon: float


class FuseRMSNorm(GraphPass):
    """`x / sqrt(mean(x^2) + eps) * weight` is one node, in f32 inside whatever the dtype around it.

    A norm that has no weight, or one for each head, gets a weight of ones; the product stays behind it.
    """

    name = "fuse_rmsnorm"
    requires = (well_formed, tokens_first)
    ensures = (well_formed, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        fused = 0
        for node in list(model.graph):
            norm = _rms(node)
            if norm is None:
                continue
            fused += 1
            centred = _centred(norm.data)
            _emit(editor, node, _Norm(centred or norm.data, norm.epsilon), "Layer" if centred is not None else "RMS")
        common.RemoveUnusedNodesPass()(model)
        return fused


def _rms(node: ir.Node) -> _Norm | None:
    """The norm without weight that a Mul or Div makes: `x * 1/sqrt(mean(x^2) + eps)` or `x / sqrt(...)`."""
    if node.op_type not in ("Mul", "Div") or node.domain:
        return None
    for data, factor in (node.inputs, node.inputs[::-1]):
        root = made_by(factor, "Sqrt") if node.op_type == "Div" else None
        if inverse := made_by(factor, "Reciprocal"):
            root = made_by(inverse.inputs[0], "Sqrt") if node.op_type == "Mul" else None
        shifted = made_by(root.inputs[0], "Add") if root is not None else None
        if data is None or shifted is None:
            continue
        for mean, epsilon in (shifted.inputs, shifted.inputs[::-1]):
            reduce, value = made_by(mean, "ReduceMean"), scalar(epsilon)
            if reduce is not None and value is not None and _over_last(reduce) and _square_of(reduce.inputs[0], data):
                return _Norm(data, float(value))
        if node.op_type == "Div":
            break
    return None


def _over_last(reduce: ir.Node) -> bool:
    """Whether a reduction goes over the last axis, and keeps it."""
    data = reduce.inputs[0]
    axes = constant(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
    rank = len(dims(data) or ()) if data is not None else 0
    kept = bool(reduce.attributes.get_int("keepdims", 1))
    return kept and axes is not None and axes.size == 1 and rank > 0 and axes.item() in (-1, rank - 1)


def _square_of(value: ir.Value | None, data: ir.Value) -> bool:
    node = value.producer() if value is not None else None
    if node is None or node.inputs[0] is not data:
        return False
    power = scalar(node.inputs[1]) if node.op_type == "Pow" else None
    return power == 2 or (node.op_type == "Mul" and node.inputs[1] is data)


def _centred(data: ir.Value) -> ir.Value | None:
    """`x` where `data` is `x - mean(x)`."""
    node = made_by(data, "Sub")
    if node is None or node.inputs[0] is None:
        return None
    reduce = made_by(node.inputs[1], "ReduceMean")
    return node.inputs[0] if reduce is not None and reduce.inputs[0] is node.inputs[0] and _over_last(reduce) else None


def _emit(editor: Editor, node: ir.Node, norm: _Norm, kind: str) -> None:
    """Put the normalization before `node`, and let it take over the product with the weight, if that is plain."""
    shape = dims(norm.data)
    assert shape is not None
    size = int(shape[-1])
    scale, result = None, node.outputs[0]
    user = only_user(result)
    if user is not None and user.op_type == "Mul":
        other = user.inputs[1] if user.inputs[0] is result else user.inputs[0]
        if other is not None and weight(other) is not None and dims(other) == (size,) and size > 1:
            scale, result = other, user.outputs[0]
    if scale is None:
        scale = editor.constant(np.ones(size, np.float32), "ones")
    attributes = {"axis": -1, "epsilon": norm.epsilon, "stash_type": int(ir.DataType.FLOAT)}
    normalized = editor.node(node, f"{kind}Normalization", [norm.data, scale], shape, attributes=attributes)
    replace(result, normalized)
