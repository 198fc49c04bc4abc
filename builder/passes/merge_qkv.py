"""The three products before attention become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, tokens_first, well_formed
from builder.passes.graph import Editor
from builder.passes.merge_products import merge, product, sources
from builder.tracing.signature import attention_nodes

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe

# What stands between a projection and attention, entry by entry or head by head.
_BETWEEN = frozenset({"Reshape", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Add", "Mul", "Clip"})


class MergeQKV(GraphPass):
    """A layer's query, key and value are one product with a weight `[(Hq + Hkv) * D + Hkv * Dv, hidden]`, split."""

    name = "merge_qkv"
    requires = (well_formed, flat_attention, tokens_first)
    ensures = (well_formed, flat_attention, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        merged = 0
        for attention in attention_nodes(model):
            found = [list(dict.fromkeys(sources(value, _BETWEEN))) for value in attention.inputs[:3]]
            products = [product(nodes[0]) if len(nodes) == 1 else None for nodes in found]
            distinct = {p.node for p in products if p is not None}
            if len(distinct) != 3 or len({p.data for p in products if p is not None}) != 1:
                continue
            merge(editor, [p for p in products if p is not None], "qkv_proj")
            merged += 1
        common.RemoveUnusedNodesPass()(model)
        return merged
