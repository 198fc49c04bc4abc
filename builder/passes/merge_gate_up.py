"""The two products of a gated MLP become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import tokens_first, well_formed
from builder.passes.graph import Editor
from builder.passes.merge_products import merge, product, sources

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe

# What an activation function may be written with.
_ACTIVATION = frozenset(
    {"Sigmoid", "Mul", "Gelu", "Tanh", "Add", "Pow", "Relu", "Erf", "Div", "Softplus", "Swish", "HardSwish", "Elu"}
)


class MergeGateUp(GraphPass):
    """`act(x gate) * (x up)` takes one product with a weight `[2 * intermediate, hidden]`, gate first, then a split."""

    name = "merge_gate_up"
    requires = (well_formed, tokens_first)
    ensures = (well_formed, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        merged = 0
        for node in list(model.graph):
            if node.op_type != "Mul" or node.domain or node.graph is None:
                continue
            sides = [list(dict.fromkeys(sources(value, _ACTIVATION))) for value in node.inputs]
            if [len(side) for side in sides] != [1, 1] or sides[0] == sides[1]:
                continue
            products = [product(side[0]) for side in sides]
            a, b = products
            if a is None or b is None or a.data is not b.data or a.size != b.size:
                continue
            if node.inputs[0] is a.output:  # the gate is the one that goes through the activation
                a, b = b, a
            merge(editor, [a, b], "gate_up_proj")
            merged += 1
        common.RemoveUnusedNodesPass()(model)
        return merged
