"""One way of writing a matrix product, so that later passes and backends need to know one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import one_product_form, tokens_first, well_formed
from builder.passes.graph import Dim, Editor, dims, only_user, replace, weight
from builder.weights import lazy, static_shape

if TYPE_CHECKING:
    from builder.recipe import Recipe


class UnifyProducts(GraphPass):
    """`Gemm`, and `MatMul` with a weight stored `[in, out]` (gpt2), become `MatMul(x, Transpose(W [out, in])) + bias`.

    A weight then lies in memory one output channel after the other, as kernels and per-channel scales want it.
    """

    name = "unify_products"
    requires = (well_formed, tokens_first)
    ensures = (well_formed, tokens_first, one_product_form)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        changed = 0
        for node in list(model.graph):
            if node.op_type == "Gemm" and not node.domain:
                changed += _rewrite_gemm(editor, node)
            elif node.op_type == "MatMul" and not node.domain and _stored_in_out(node.inputs[1]):
                _set_weight(editor, node, node.inputs[1])
                changed += 1
        common.RemoveUnusedNodesPass()(model)
        return changed


def _stored_in_out(value: ir.Value | None) -> bool:
    """Whether `value` is a weight of two axes that a product takes as it is."""
    return value is not None and weight(value) is not None and len(dims(value) or ()) == 2


def _rewrite_gemm(editor: Editor, node: ir.Node) -> bool:
    attributes = node.attributes
    plain = attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0
    data, matrix = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    shape, columns = dims(node.outputs[0]), dims(matrix) if matrix is not None else None
    if not plain or attributes.get_int("transA", 0) or data is None or matrix is None or not shape or not columns:
        return False
    transposed = matrix
    if attributes.get_int("transB", 0):
        transposed = editor.node(node, "Transpose", [matrix], columns[::-1], attributes={"perm": [1, 0]})
    result: ir.Value = editor.node(node, "MatMul", [data, transposed], shape)
    product = result.producer()
    if product is not None and _stored_in_out(transposed):
        _set_weight(editor, product, transposed)
    if bias is not None:
        result = editor.node(node, "Add", [result, bias], shape)
    replace(node.outputs[0], result)
    return True


def _set_weight(editor: Editor, node: ir.Node, value: ir.Value | None) -> None:
    """Let the MatMul take the weight `[in, out]` as `[out, in]` behind a Transpose; its values are turned when read."""
    assert value is not None
    tensor = weight(value)
    assert tensor is not None
    rows, columns = static_shape(value)
    stored = value
    if only_user(value) is node:
        stored.const_value = lazy(value.name or "weight", tensor.dtype, (columns, rows), lambda: tensor.numpy().T)
        stored.shape = ir.Shape((columns, rows))
    else:  # something else reads it as it is
        name = f"{value.name}.transposed"
        stored = editor.initializer(name, lazy(name, tensor.dtype, (columns, rows), lambda: tensor.numpy().T))
    shape: tuple[Dim, ...] = (rows, columns)
    turned = editor.node(node, "Transpose", [stored], shape, attributes={"perm": [1, 0]})
    node.replace_input_with(1, turned)
