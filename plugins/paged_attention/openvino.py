"""`plancast::PagedAttention` on OpenVINO: the ONNX node becomes our C++ operation, or the CPU plugin's own.

Ours (`native.py`) lives in the native library. A model that holds it can be read without: its nodes then become the
plugin's own, where that can compute them.

The plugin's operation takes 28 inputs and promises no compatibility between OpenVINO versions, so the version is
pinned. No serialized form brings it back whole: its class is unknown to whoever reads IR, and the heads and head sizes,
which the CPU plugin reads from the node's run-time info, are not written. The native library mends both for IR and
compiled blobs; `Placeholder` and `restore_nodes` mend IR where there is no library.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import op
from openvino import opset13 as ops
from openvino.frontend.onnx import ConversionExtension
from openvino.utils.node_factory import NodeFactory

from plugins.paged_attention import native
from plugins.paged_attention.op import DOMAIN, INPUTS, OP_TYPE

OV_OP_TYPE = "PagedAttentionExtension"
BLOCK_SIZE = 32  # the CPU plugin's only block size

# The CPU plugin's name for each kv_dtype of ours. int8 cells are asymmetric: a scale and a zero point (f32 each) a
# token and head. Key and value must have the same dtype, which must go with the compute dtype; any other pair compiles,
# and fails at the first step (measured on 2026.4.1).
KV_PRECISIONS = {"f32": "f32", "f16": "f16", "bf16": "bf16", "int8": "u8"}
KV_SCALE_BYTES = {"f32": 0, "f16": 0, "bf16": 0, "int8": 8}
KV_DTYPES = {"f32": ("f32", "f16", "int8"), "bf16": ("bf16", "int8")}  # by compute dtype

_REQUIRED = ("num_heads", "num_kv_heads", "head_size", "v_head_size", "scale", "layer")
_OPTIONAL = {
    "sliding_window": 0,
    "softcap": 0.0,
    "block_size": BLOCK_SIZE,
    "kv_dtype": "f32",
    "group_size": 32,
    "rotate": "none",
    "key_scale": 0.0,
    "value_scale": 0.0,
}


def refusal(attributes: Mapping[str, Any], inputs: Collection[str] = ()) -> str | None:
    """Why OpenVINO's operation cannot compute a node with these attributes and named inputs; None where it can."""
    dtype = attributes.get("kv_dtype", "f32")
    if dtype not in KV_PRECISIONS:
        return f"KV cache {dtype}: OpenVINO's paged attention stores {', '.join(KV_PRECISIONS)}, keys and values alike"
    if attributes.get("softcap"):
        return f"attention logit softcap {attributes['softcap']:g}: OpenVINO's paged attention has no softcap"
    if attributes.get("sliding_window") and "alibi_slopes" in inputs:
        return (
            f"sliding window {attributes['sliding_window']} with ALiBi: OpenVINO's paged attention computes the two "
            "together wrongly"
        )
    if attributes["block_size"] != BLOCK_SIZE:
        return f"KV block size {attributes['block_size']}: OpenVINO's CPU plugin works with {BLOCK_SIZE} alone"
    return None


def conversion_extension(library: Path | None = None) -> ConversionExtension:
    """The extension that makes OpenVINO's ONNX front end read our node. Add it with `Core.add_extension`.

    With `library`, our native one, the node becomes our own operation; without it OpenVINO's. A node that the chosen
    operation cannot compute raises `RuntimeError` with its refusal's words out of `Core.read_model`.
    """
    return ConversionExtension(OP_TYPE, DOMAIN, lambda context: _convert(context, library))


class Placeholder(ov.Op):
    """Stands for the paged-attention operation while IR is read without the native library."""

    def __init__(self, inputs: Any = None):
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        query, key, value = (self.get_input_partial_shape(i) for i in range(3))
        width = query[1].get_length() * value[1].get_length() // key[1].get_length()
        self.set_output_size(3)
        self.set_output_type(0, self.get_input_element_type(0), ov.PartialShape([query[0], width]))
        for unused in (1, 2):
            self.set_output_type(unused, self.get_input_element_type(0), ov.PartialShape([-1]))

    def clone_with_new_inputs(self, inputs: Any) -> Placeholder:
        return Placeholder(inputs)

    def visit_attributes(self, arg0: Any) -> bool:
        return True


class OwnPlaceholder(Placeholder):
    """Stands for our own operation while IR is read without the native library."""

    def clone_with_new_inputs(self, inputs: Any) -> OwnPlaceholder:
        return OwnPlaceholder(inputs)


Placeholder.__name__ = OV_OP_TYPE  # the class's name is the type that it is found by
OwnPlaceholder.__name__ = OP_TYPE


def reading_core(library: Path | None) -> ov.Core:
    """A core that reads IR with paged-attention nodes, and compiled blobs too where `library`, our native one, is."""
    core = ov.Core()
    for extension in [str(library)] if library else [Placeholder, OwnPlaceholder]:
        core.add_extension(extension)
    return core


def restore_nodes(model: ov.Model) -> int:
    """Make the paged-attention nodes of a model that was read from IR whole again. Returns how many stopped being ours.

    Raises:
        RuntimeError: a node of ours, read without the native library, that OpenVINO's operation cannot compute.
    """
    replaced = 0
    for node in model.get_ordered_ops():
        if isinstance(node, OwnPlaceholder):
            _replace(node, _openvinos_own(node))
            replaced += 1
        elif isinstance(node, Placeholder):
            _replace(node, _openvinos(node.input_values()))
        elif node.get_type_name() == OV_OP_TYPE:
            _set_head_sizes(node)
    return replaced


def _replace(node: ov.Node, other: ov.Node) -> None:
    other.set_friendly_name(node.get_friendly_name())
    other.output(0).set_names(node.output(0).get_names())
    for target in node.output(0).get_target_inputs():
        target.replace_source_output(other.output(0))


def _openvinos(inputs: list[ov.Output]) -> ov.Node:
    node = op._PagedAttentionExtension(inputs)
    _set_head_sizes(node)
    return node


def _openvinos_own(node: ov.Node) -> ov.Node:
    """A node of ours as OpenVINO's, with its caches reshaped."""
    settings, scalars = (np.asarray(node.input_value(i).get_node().data) for i in range(len(INPUTS), len(INPUTS) + 2))
    attributes = native.read_settings(settings, scalars)
    given = {name: node.input_value(i) for i, name in enumerate(INPUTS)}
    for name in ("sinks", "alibi_slopes"):
        if given[name].get_partial_shape() == ov.PartialShape([0]):
            del given[name]
    reason = refusal(attributes, given)
    if reason:
        raise RuntimeError(f"{reason}, and our C++ operators are not built here: python -m plugins.native")
    return _openvinos(_openvino_inputs(attributes, given))


def _set_head_sizes(node: ov.Node) -> None:
    """Heads stand in the cache's shape [num_blocks, heads, block_size, cell]; a head's size is the row's share."""
    info = node.get_rt_info()
    for kind, row, cache in (("k", 1, 3), ("v", 2, 4)):
        heads = node.input_value(cache).get_partial_shape()[1].get_length()
        info[f"num_{kind}_heads"] = heads
        info[f"{kind}_head_size"] = node.input_value(row).get_partial_shape()[1].get_length() // heads


def _constant(value: Any, dtype: Any) -> ov.Output:
    return ops.constant(np.array(value, dtype)).output(0)


def _empty(dtype: Any) -> ov.Output:
    return _constant([], dtype)


def _convert(context: Any, library: Path | None) -> list[ov.Output]:
    """The front end's NodeContext of one of our nodes -> the outputs of the operation that it becomes."""
    attributes = {name: context.get_attribute(name) for name in _REQUIRED}
    attributes |= {name: context.get_attribute(name, default) for name, default in _OPTIONAL.items()}
    given = {name: context.get_input(i) for i, name in enumerate(INPUTS) if i < context.get_input_size()}
    given = {name: output for name, output in given.items() if output.get_node().get_type_name() != "NullNode"}
    reason = native.refusal(attributes) if library else refusal(attributes, given)
    if reason:
        raise NotImplementedError(f"layer {attributes['layer']}: {reason}")
    node = _own(attributes, given, library) if library else _openvinos(_openvino_inputs(attributes, given))
    node.set_friendly_name(f"paged_attention.{attributes['layer']}")
    return [node.output(0)]


def _own(attributes: dict[str, Any], given: dict[str, ov.Output], library: Path) -> ov.Node:
    """Our operation, its caches u8 pages."""
    for name, form, size in zip(
        ("key_cache", "value_cache"), native.formats(attributes), ("head_size", "v_head_size"), strict=True
    ):
        page = BLOCK_SIZE * form.cell_bytes(attributes[size])
        _shape_cache(given[name], [attributes["num_kv_heads"], page], ov.Type.u8)
    inputs: list[ov.Node | ov.Output] = [given.get(name, _empty(np.float32)) for name in INPUTS]
    inputs += [ops.constant(native.settings(attributes)).output(0), ops.constant(native.scalars(attributes)).output(0)]
    return _factory(library).create(OP_TYPE, inputs)


@functools.cache
def _factory(library: Path) -> NodeFactory:
    factory = NodeFactory()
    factory.add_extension(str(library))
    return factory


def _shape_cache(cache: ov.Output, block: list[int], dtype: ov.Type) -> None:
    """Whatever the trace knew of the shape: [num_blocks, *block]."""
    parameter = cache.get_node()
    parameter.set_partial_shape(ov.PartialShape([-1, *block]))
    parameter.set_element_type(dtype)
    parameter.validate_and_infer_types()


def _openvino_inputs(attributes: Mapping[str, Any], given: Mapping[str, ov.Output]) -> list[ov.Output]:
    """The 28 inputs of OpenVINO's operation. The caches' cell type is the compiler's choice."""
    for name, size in (("key_cache", "head_size"), ("value_cache", "v_head_size")):
        _shape_cache(given[name], [attributes["num_kv_heads"], BLOCK_SIZE, attributes[size]], ov.Type.f32)
    sinks = given.get("sinks")
    if sinks is not None:
        sinks = ops.reshape(sinks, _constant([1, attributes["num_heads"], 1, 1], np.int32), False).output(0)
    return [
        *(given[name] for name in INPUTS[:9]),
        _constant(attributes["scale"], np.float32),
        _constant(attributes["sliding_window"], np.int32),
        given.get("alibi_slopes", _empty(np.float32)),
        given["max_context_len"],
        _empty(np.int32),  # score_aggregation_window
        _empty(np.int32),  # rotated_block_indices
        _empty(np.int32),  # rotation_deltas
        _empty(np.float32),  # rotation_trig_lut
        _empty(np.float32),  # xattention_threshold
        _constant(0, np.int32),  # xattention_block_size
        _constant(0, np.int32),  # xattention_stride
        sinks if sinks is not None else _empty(np.float32),
        _constant(0, np.int32),  # adaptive_rkv_start_size
        _empty(np.int32),  # adaptive_rkv_evictable_sizes
        _empty(np.int32),  # adaptive_rkv_diversity_block_set_indices
        _empty(np.int32),  # adaptive_rkv_diversity_block_set_indices_begins
        _empty(np.int32),  # token_type_ids
        _empty(np.uint8),  # qq_bias
        _empty(np.int32),  # qq_bias_begins
    ]
