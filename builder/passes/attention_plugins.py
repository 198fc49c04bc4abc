"""Attention nodes as chains of TensorRT plugin nodes (`plugins/paged_attention/tensorrt_launch.py`).

    WriteKV -> Attend                        or, with split keys:    WriteKV -> AttendSplits -> MergeSplits

Caches become pages [num_blocks, heads, page] in the cells' float type, else int8. WriteKV's outputs are its cache
inputs under other names: what attends takes those, and so runs after the writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.tracing.signature import attention_nodes
from plugins.paged_attention.grids import power_of_two
from plugins.paged_attention.native import formats
from plugins.paged_attention.op import DOMAIN, INPUTS
from plugins.paged_attention.tensorrt_launch import PLUGINS
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

_FLOATS = {"f32": "FLOAT", "f16": "FLOAT16", "bf16": "BFLOAT16"}


def replace_attention(model: ir.Model, capability: int, *, splits: int = 1, block_m: int = 16) -> int:
    """Replace every attention node, for compute capability `capability` (90 for SM90); returns how many there were.

    Args:
        splits: pieces that the keys are shared out in; 1: whole.
        block_m: rows of a tile at least: 16 where steps decode, 64 where they read prompts.

    Raises:
        BuildError: a node that the plugins do not compute.
    """
    nodes = attention_nodes(model)
    for node in nodes:
        _replace(model, node, capability, splits, block_m)
    return len(nodes)


def _replace(model: ir.Model, node: ir.Node, capability: int, splits: int, block_m: int) -> None:
    import onnx_ir as ir

    given: dict[str, ir.Value | None] = dict(zip(INPUTS, node.inputs, strict=False))
    attributes: dict[str, Any] = {"key_scale": 0.0, "value_scale": 0.0, "softcap": 0.0, "sliding_window": 0}
    attributes |= {name: attribute.value for name, attribute in node.attributes.items()}
    layer, query = attributes["layer"], given["query"]
    if attributes.get("rotate", "none") != "none":
        raise BuildError(f"layer {layer}: kv.rotate {attributes['rotate']} is not computed by TensorRT; set it to none")
    assert query is not None
    attributes |= {
        "compute_capability": capability, "splits": splits,
        "block_m": power_of_two(attributes["num_heads"] // attributes["num_kv_heads"], block_m),
        "has_sinks": int(given.get("sinks") is not None), "has_alibi": int(given.get("alibi_slopes") is not None),
    }  # fmt: skip
    values: dict[str, ir.Value | None] = {**given, "like": query}
    for name in ("sinks", "alibi_slopes"):  # a plugin has no optional inputs: what is not read may be anything
        values[name] = values.get(name) or query
    for part, form in zip(("key", "value"), formats(attributes), strict=True):
        size = attributes["head_size" if part == "key" else "v_head_size"]
        page = attributes["block_size"] * (form.cell_bytes(size) if form.packed else size)
        cache = given[f"{part}_cache"]
        assert cache is not None
        assert cache.shape is not None
        cache.shape = ir.Shape([cache.shape[0], attributes["num_kv_heads"], page])
        cache.dtype = ir.DataType[_FLOATS.get(form.dtype, "INT8")]

    def add(kind: str, results: dict[str, tuple[Any, Any]]) -> list[ir.Value]:
        """A node of the plugin `kind`; `results`: name -> dtype, shape."""
        plugin = PLUGINS[kind]
        fields = [ir.AttrString("plugin_namespace", DOMAIN), ir.AttrString("plugin_version", "1")]
        for name, what in plugin.attributes.items():
            make = {int: ir.AttrInt64, float: ir.AttrFloat32, str: ir.AttrString}[what]
            fields.append(make(name, attributes[name]))
        new = ir.Node(DOMAIN, kind, [values[name] for name in plugin.inputs], fields, num_outputs=len(results))
        for value, (name, (dtype, shape)) in zip(new.outputs, results.items(), strict=True):
            value.name, value.dtype, value.shape = f"{kind}.{name}.{layer}", dtype, ir.Shape(shape)
        assert node.graph is not None
        node.graph.insert_before(node, new)
        return list(new.outputs)

    caches = {f"{part}_cache": given[f"{part}_cache"] for part in ("key", "value")}
    written = add("WriteKV", {f"{n}_out": (v.dtype, v.shape) for n, v in caches.items() if v is not None})
    values |= dict(zip(caches, written, strict=True))
    result = node.outputs[0]
    out = {"attention": (query.dtype, result.shape)}
    if splits == 1:
        (made,) = add("Attend", out)
    else:
        lead = (splits, query.shape[0] if query.shape is not None else "T", attributes["num_heads"])
        f32 = ir.DataType.FLOAT
        parts = {"partial": (f32, (*lead, attributes["v_head_size"])), "partial_stats": (f32, (*lead, 2))}
        values |= dict(zip(parts, add("AttendSplits", parts), strict=True))
        (made,) = add("MergeSplits", out)
    result.replace_all_uses_with(made)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    model.opset_imports[DOMAIN] = 1
