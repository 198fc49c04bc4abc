"""State the recipe's KV cache on each attention node: the cells' format and the tokens in a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, well_formed
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import INPUTS
from runtime.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.quantization.kv_scales import StaticScales
    from builder.recipe import Recipe


class QuantizeKV(GraphPass):
    """`kv_dtype` (`int8`, or `bf16:int8` for key and value), its details and `block_size` of each node.

    Skipped layers keep 16 bits, which lose next to nothing: f16, or bf16 where the engine computes in that.

    The cache inputs stay f32 in the graph: what a cell looks like in memory is the backend's matter.
    """

    name = "quantize_kv"
    requires = (well_formed, flat_attention)
    ensures = (well_formed, flat_attention)

    def __init__(self, scales: Mapping[int, StaticScales] | None = None):
        """`scales`: static ones, by layer."""
        self.scales = scales or {}

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        kv = recipe.kv
        nodes = attention_nodes(model)
        layers = [node.attributes["layer"].as_int() for node in nodes]
        unknown = sorted(set(kv.skip_layers) - set(layers))
        if unknown:
            raise BuildError(
                f"kv.skip_layers names {', '.join(map(str, unknown))}, and the model has the layers 0..{max(layers)}"
            )
        for node in nodes:
            skipped = node.attributes["layer"].as_int() in kv.skip_layers
            dtype = kv.key if kv.key == kv.value else f"{kv.key}:{kv.value}"
            if skipped:
                dtype = "bf16" if recipe.backend.compute == "bf16" else "f16"
            rotate = "none" if skipped else kv.rotate
            node.attributes["kv_dtype"] = ir.AttrString("kv_dtype", dtype)
            node.attributes["group_size"] = ir.AttrInt64("group_size", kv.group_size)
            node.attributes["rotate"] = ir.AttrString("rotate", rotate)
            if self.scales and not skipped:
                static = self.scales[node.attributes["layer"].as_int()]
                node.attributes["key_scale"] = ir.AttrFloat32("key_scale", static.key)
                node.attributes["value_scale"] = ir.AttrFloat32("value_scale", static.value)
            node.attributes["block_size"] = ir.AttrInt64("block_size", kv.block_size)
            for name in ("key_cache", "value_cache"):
                cache = node.inputs[INPUTS.index(name)]
                assert cache is not None
                assert cache.shape is not None
                cache.shape = ir.Shape([cache.shape[0], cache.shape[1], kv.block_size, cache.shape[3]])
        return len(nodes)
