"""Compute logits, and all that leads to them alone, only for the rows that want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import rows_before_head, tokens_first, well_formed
from builder.passes.graph import Editor, constant, dims, replace

if TYPE_CHECKING:
    from builder.recipe import Recipe

# Operators whose number of entries an input states, rather than the data: they keep all tokens.
_OWN_LENGTH = frozenset({"Shape", "ConstantOfShape", "Range"})


class GatherRows(GraphPass):
    """The rows are picked as early as can be: in the last layer right after its attention, so that its output
    projection and MLP, the final norm and the head run on `[R, ...]`. A trace picks them after the final norm."""

    name = "gather_rows"
    requires = (well_formed, tokens_first)
    ensures = (well_formed, tokens_first, rows_before_head)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        picks = [node for node in model.graph if picks_rows(node)]
        if len(picks) != 1:
            return 0
        (pick,) = picks
        on_rows = _leading_only_to(pick, model)
        data, rows = pick.inputs
        assert data is not None
        editor = Editor(model)
        gathered: dict[ir.Value, ir.Value] = {}
        for node in (node for node in model.graph if node in on_rows):
            for index, value in enumerate(node.inputs):
                shape = dims(value) if value is not None else None
                if value is None or not shape or shape[0] != "T" or value.producer() in on_rows:
                    continue
                if value not in gathered:
                    gathered[value] = editor.node(
                        node, "Gather", [value, rows], ("R", *shape[1:]), attributes={"axis": 0}, dtype=value.dtype
                    )
                node.replace_input_with(index, gathered[value])
            for value in node.outputs:
                value.shape = ir.Shape(["R" if dim == "T" else dim for dim in dims(value) or ()])
        if on_rows:
            replace(pick.outputs[0], data)
        common.RemoveUnusedNodesPass()(model)
        return len(on_rows)


def picks_rows(node: ir.Node) -> bool:
    """Whether `node` is `Gather(data [T, ...], logits_rows)` along the first axis."""
    if node.op_type != "Gather" or node.domain or node.attributes.get_int("axis", 0) != 0:
        return False
    data, rows = node.inputs
    return data is not None and (dims(data) or (0,))[0] == "T" and rows is not None and rows.name == "logits_rows"


def _leading_only_to(pick: ir.Node, model: ir.Model) -> set[ir.Node]:
    """The nodes whose results reach nothing but `pick`, each row by itself."""
    found: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        users = {use.node for value in node.outputs for use in value.uses()}
        shapes = [dims(value) or (0,) for value in node.outputs]
        row_wise = not node.domain and node.op_type not in _OWN_LENGTH and all(shape[0] == "T" for shape in shapes)
        reads_rows = any(value is not None and (dims(value) or (0,))[0] == "T" for value in node.inputs)
        if node is pick or not users or not row_wise or not reads_rows:
            continue
        if node.op_type in ("Reshape", "Expand") and constant(node.inputs[1]) is None:
            continue
        if users <= found | {pick}:
            found.add(node)
    return found
