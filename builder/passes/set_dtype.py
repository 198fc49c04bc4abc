"""Store the matrices in the recipe's float dtype. Activations, norms, rope tables and logits stay f32 in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from builder.passes.base import GraphPass
from builder.passes.conditions import f32_activations, well_formed
from builder.passes.graph import Editor, dims
from builder.passes.matrices import matrices
from builder.quantization.scheme import scheme_of
from builder.weights import cast

if TYPE_CHECKING:
    from builder.recipe import Recipe

_DTYPES = {"f16": "FLOAT16", "bf16": "BFLOAT16"}


class SetDtype(GraphPass):
    """Each matrix whose scheme is bf16 or f16 becomes so, behind a `Cast` to f32.

    Of an embedding: behind the rows that are looked up.

    In which dtype the products run is the backend's matter (`backend.compute`): it folds the casts into them.
    """

    name = "set_dtype"
    requires = (well_formed, f32_activations)
    ensures = (well_formed, f32_activations)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        done = 0
        for matrix in matrices(model):
            scheme = scheme_of(recipe.weights, matrix.names)
            if scheme.dtype not in _DTYPES:
                continue
            done += 1
            dtype = ir.DataType[_DTYPES[scheme.dtype]]
            value, tensor, _ = matrix
            uses = list(value.uses())
            stored = cast(tensor, dtype)
            stored.name = value.name
            value.const_value = stored
            value.dtype = dtype
            shape = dims(value)
            assert shape is not None
            back: ir.Value | None = None
            for node, index in uses:
                if node.op_type == "Gather":
                    self._cast_rows(node)
                    continue
                if back is None:
                    back = editor.node(
                        node, "Cast", [value], shape, attributes={"to": ir.DataType.FLOAT}, dtype=ir.DataType.FLOAT
                    )
                node.replace_input_with(index, back)
        return done

    @staticmethod
    def _cast_rows(gather: ir.Node) -> None:
        rows = gather.outputs[0]
        rows.dtype = gather.inputs[0].dtype  # type: ignore[union-attr]
        node = ir.node("Cast", [rows], attributes={"to": ir.DataType.FLOAT})
        (result,) = node.outputs
        result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), rows.shape
        for use in rows.uses():
            if use.node is not node:
                use.node.replace_input_with(use.idx, result)
        assert gather.graph is not None
        gather.graph.insert_after(gather, node)
