"""State the recipe's KV cache on each attention node: the cells' format and the tokens in a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, well_formed
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import INPUTS

if TYPE_CHECKING:
    from builder.recipe import Recipe


class QuantizeKV(GraphPass):
    """`kv_dtype` (`int8`, or `bf16:int8` for key and value) and `block_size` of each node; the caches' block size.

    The cache inputs stay f32 in the graph: what a cell looks like in memory is the backend's matter.
    """

    name = "quantize_kv"
    requires = (well_formed, flat_attention)
    ensures = (well_formed, flat_attention)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        kv = recipe.kv
        nodes = attention_nodes(model)
        for node in nodes:
            dtype = kv.key if kv.key == kv.value else f"{kv.key}:{kv.value}"
            node.attributes["kv_dtype"] = ir.AttrString("kv_dtype", dtype)
            node.attributes["block_size"] = ir.AttrInt64("block_size", kv.block_size)
            for name in ("key_cache", "value_cache"):
                cache = node.inputs[INPUTS.index(name)]
                assert cache is not None
                assert cache.shape is not None
                cache.shape = ir.Shape([cache.shape[0], cache.shape[1], kv.block_size, cache.shape[3]])
        return len(nodes)
