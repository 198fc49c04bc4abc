"""One decoder layer of a graph, as plain values: what `plancast inspect --graph` draws.

A layer ends where the whole past flows through one tensor, the residual stream: the last such cut before the next
attention node. Nothing here depends on names, so it holds for any family, before and after fusion.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from plugins.paged_attention.op import OP_TYPE as ATTENTION

if TYPE_CHECKING:
    import onnx_ir as ir

GRAPH_NAME = "graph.json"  # the file of an artifact that holds `Graphs`

# Shape arithmetic and small constants say nothing about a layer.
_WEIGHT_ELEMENTS = 64


class LayerNode(msgspec.Struct):
    """A node. `inputs` are indices of nodes, or -1 - i for the i-th of the layer's inputs."""

    op: str
    inputs: list[int]
    weights: list[str] = []  # such as "q_proj.weight 576x576 int8"
    shape: str = ""  # of the first output


class LayerGraph(msgspec.Struct):
    """A layer's nodes in topological order, the names of the tensors it takes from outside, and its output nodes."""

    layer: int
    inputs: list[str]
    nodes: list[LayerNode]
    outputs: list[int]


class Graphs(msgspec.Struct):
    """graph.json of an artifact: the same layer as traced and as compiled."""

    traced: LayerGraph
    fused: LayerGraph


def operator_counts(model: ir.Model) -> dict[str, int]:
    """Nodes by operator, most frequent first."""
    return dict(Counter(node.op_type for node in model.graph).most_common())


def weight_bytes(model: ir.Model) -> dict[str, int]:
    """Bytes of the weights by dtype (f32, bf16, int8, ...) or as `scale`, largest first; a shared one counts once."""
    scales = {value for node in model.graph if node.op_type == "DequantizeLinear" for value in node.inputs[1:] if value}
    total: Counter[str] = Counter()
    for value in model.graph.initializers.values():
        if value.const_value is None or value.const_value.size < _WEIGHT_ELEMENTS:
            continue
        total["scale" if value in scales else _dtype_name(value)] += int(value.const_value.nbytes)
    return dict(total.most_common())


def extract_layer(model: ir.Model) -> LayerGraph:
    """The second decoder layer of `model` (a typical one: the first and last touch the embedding and the head).

    A model of one layer is returned whole. Where no single tensor separates the layers, the stretch from one attention
    node to the next stands for a layer.
    """
    nodes = list(model.graph)
    attention = [index for index, node in enumerate(nodes) if node.op_type == ATTENTION]
    if len(attention) < 2:
        return _describe(nodes, range(len(nodes)), layer=0)
    first, second = _cuts(nodes, attention)[:2]
    if first and second:
        # Behind the last layer the norm and the head follow, one tensor after the other: count as in the layer before.
        start, end = first[-1], second[-1] if len(attention) > 2 else second[min(len(first), len(second)) - 1]
    else:
        start, end = attention[0], attention[1]
    return _describe(nodes, range(start + 1, end + 1), layer=1)


def _cuts(nodes: list[ir.Node], attention: list[int]) -> list[list[int]]:
    """For each attention node, the positions from it to the next after which a single activation is alive.

    An activation is what depends on `input_ids`: not weights, not cosines.
    """
    last_use: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        last_use.update((value, index) for value in node.inputs if value is not None)
    found: list[list[int]] = [[] for _ in attention]
    activations: set[ir.Value] = set()
    alive: set[ir.Value] = set()
    layer = -1
    for index, node in enumerate(nodes):
        layer += node.op_type == ATTENTION
        if node.op_type not in ("Shape", "Size") and any(
            value is not None and (value in activations or value.name == "input_ids") for value in node.inputs
        ):
            activations.update(node.outputs)
            alive.update(node.outputs)
        alive = {value for value in alive if last_use.get(value, -1) > index}
        if layer >= 0 and len(alive) == 1 and not alive.isdisjoint(node.outputs):
            found[layer].append(index)
    return found


def _weight_nodes(nodes: list[ir.Node]) -> set[ir.Node]:
    """Nodes that depend on no input of the graph: they make weights ready (a transpose, a dequantization)."""
    found: set[ir.Node] = set()
    for node in nodes:
        if all(value is None or value.is_initializer() or value.producer() in found for value in node.inputs):
            found.add(node)
    return found


def _describe(nodes: list[ir.Node], indices: Iterable[int], *, layer: int) -> LayerGraph:
    """The nodes at `indices` as plain values. What only prepares weights is folded into the node that uses them."""
    weight_nodes = _weight_nodes(nodes)
    chosen = [nodes[index] for index in indices if nodes[index] not in weight_nodes]
    number = {node: index for index, node in enumerate(chosen)}
    graph = LayerGraph(layer=layer, inputs=[], nodes=[], outputs=[])
    for node in chosen:
        described = LayerNode(op=node.op_type, inputs=[], shape=_shape(node.outputs[0]))
        for value in node.inputs:
            if value is None:
                continue
            producer = value.producer()
            if value.is_initializer() or producer in weight_nodes:
                described.weights += _weights(value)
            elif producer in number:
                described.inputs.append(number[producer])
            else:
                name = _outside_name(value)
                if name not in graph.inputs:
                    graph.inputs.append(name)
                described.inputs.append(-1 - graph.inputs.index(name))
        graph.nodes.append(described)
    for node, index in number.items():
        users = [user for value in node.outputs for user, _ in value.uses()]
        if not users or any(user not in number for user in users):
            graph.outputs.append(index)
    return graph


def _outside_name(value: ir.Value) -> str:
    """What to call a tensor from outside the layer: cos or sin where it is one, however it was reshaped."""
    before: ir.Value | None = value
    for _ in range(6):
        node = before.producer() if before is not None else None
        if node is None or node.op_type in ("MatMul", "Add", "Gather"):
            break
        if node.op_type in ("Cos", "Sin"):
            return node.op_type.lower()
        before = node.inputs[0] if node.inputs else None
    return str(value.name)


def _weights(value: ir.Value) -> list[str]:
    """The weights that `value` is made of, with shape and dtype; small constants are left out."""
    if value.is_initializer():
        shape = [int(size) for size in value.shape or () if isinstance(size, int)]
        if not shape or math.prod(shape) < _WEIGHT_ELEMENTS:
            return []
        name = re.sub(r"^.*\.\d+\.", "", str(value.name))
        return [f"{name} {'x'.join(map(str, shape))} {_dtype_name(value)}"]
    node = value.producer()
    return [weight for before in node.inputs if before is not None for weight in _weights(before)] if node else []


def _shape(value: ir.Value) -> str:
    return f"[{', '.join(map(str, value.shape))}]" if value.shape is not None else ""


def _dtype_name(value: ir.Value) -> str:
    """The value's dtype by the recipes' names: f32, bf16, int8, ..."""
    name = value.dtype.name if value.dtype is not None else "unknown"
    return {"FLOAT": "f32", "FLOAT16": "f16", "BFLOAT16": "bf16", "DOUBLE": "f64"}.get(name, name.lower())
