"""The engine's signature: which inputs a traced graph gets, what its dimensions are called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from plugins.paged_attention.op import DOMAIN, INPUTS, OP_TYPE

if TYPE_CHECKING:
    import onnx_ir as ir

# Inputs that all layers share: name -> dimensions. Symbols: T tokens, B sequences, N blocks in the tables, R rows.
TABLES: dict[str, tuple[str, ...]] = {
    "past_lens": ("B",),
    "query_starts": ("B + 1",),
    "block_ids": ("N",),
    "block_starts": ("B + 1",),
    "max_context_len": (),
}
DEFAULT_BLOCK_SIZE = 32
# By task, the name of the engine's one output: logits [R, V], or the last hidden states [R, H].
OUTPUTS = {"generate": "logits", "embed": "hidden"}
# What a target gives a head, and a head itself, beside the logits: the hidden states [R, H] that they were read off.
HIDDEN = OUTPUTS["embed"]


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """The `plancast::PagedAttention` nodes of the graph, in order."""
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type == OP_TYPE]


def wire_caches(model: ir.Model) -> None:
    """Give each attention node its caches and the batch's tables, as graph inputs, and number them by layer.

    Adds past_lens, query_starts, block_ids, block_starts, max_context_len (i32), and `key_cache.{i}`, `value_cache.{i}`
    (f32 `[num_blocks, Hkv, block_size, D]`) for each layer `i`, after the inputs that are there.
    """
    import onnx_ir as ir

    def graph_input(name: str, dtype: ir.DataType, dims: tuple[int | str, ...]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
        model.graph.inputs.append(value)
        return value

    tables = {name: graph_input(name, ir.DataType.INT32, dims) for name, dims in TABLES.items()}
    for node in sorted(attention_nodes(model), key=lambda node: node.attributes["layer"].as_int()):
        layer = node.attributes["layer"].as_int()
        node.attributes["kv_dtype"] = ir.AttrString("kv_dtype", "f32")
        node.attributes["block_size"] = ir.AttrInt64("block_size", DEFAULT_BLOCK_SIZE)
        heads = node.attributes["num_kv_heads"].as_int()
        node.resize_inputs(len(INPUTS))
        for name, size in (("key_cache", "head_size"), ("value_cache", "v_head_size")):
            dims = ("num_blocks", heads, DEFAULT_BLOCK_SIZE, node.attributes[size].as_int())
            cache = graph_input(f"{name}.{layer}", ir.DataType.FLOAT, dims)
            node.replace_input_with(INPUTS.index(name), cache)
        for name, table in tables.items():
            node.replace_input_with(INPUTS.index(name), table)
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def name_dimensions(model: ir.Model, output: str = "logits") -> None:
    """Call the traced dimensions T (tokens) and R (rows that want an output), everywhere; and name the output."""
    import onnx_ir as ir

    inputs = {value.name: value for value in model.graph.inputs}
    names = {}
    for name, symbol in (("input_ids", "T"), ("logits_rows", "R")):
        shape = inputs[name].shape
        assert shape is not None
        names[str(shape[0])] = symbol
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))

    def rename(value: ir.Value | None) -> None:
        if value is None or value.shape is None or value.shape.is_static():
            return
        dims = [d if isinstance(d, int) else pattern.sub(lambda m: names[m[0]], str(d)) for d in value.shape]
        value.shape = ir.Shape([None if d == "None" else d for d in dims])

    for value in model.graph.inputs:
        rename(value)
    for node in model.graph:
        for value in node.outputs:
            rename(value)
    model.graph.outputs[0].name = output
