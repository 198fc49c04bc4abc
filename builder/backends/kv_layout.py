"""The KV cache that a graph asks for, layer by layer, for every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from builder.tracing.signature import attention_nodes
from runtime.kv_layout import KvLayer, KvLayout

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe
    from plugins.paged_attention.kv_formats import KvFormat


def layout_of(model: ir.Model, recipe: Recipe, scale_bytes: Callable[[KvFormat, int], int]) -> KvLayout:
    """The layout of the attention nodes in `model`; `scale_bytes(format, head size)`: what a head's scales take."""
    from plugins.paged_attention.native import formats

    layers = []
    for node in sorted(attention_nodes(model), key=lambda node: node.attributes["layer"].as_int()):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        key, value = formats(attributes)
        sizes = attributes["head_size"], attributes["v_head_size"]
        layers.append(
            KvLayer(
                num_kv_heads=attributes["num_kv_heads"],
                key_head_size=sizes[0],
                value_head_size=sizes[1],
                key_dtype=key.dtype,
                value_dtype=value.dtype,
                key_scale_bytes=scale_bytes(key, sizes[0]),
                value_scale_bytes=scale_bytes(value, sizes[1]),
                sliding_window=attributes["sliding_window"],
            )
        )
    return KvLayout(block_size=recipe.kv.block_size, layers=tuple(layers))
