"""The graph as a chain of segments between its attention nodes, for a compiler that takes no operators of others.

    segment 0 -> attention 0 -> segment 1 -> attention 1 -> ... -> segment L

A node belongs to the segment after the last attention node that it depends on, so what depends on none (embedding,
rotary tables) is computed once, in the first. What depends on constants alone (a weight's scales and transposition)
stands in each segment that uses it, for its compiler to fold: weights never cross from one segment into another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.tracing.signature import attention_nodes
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Segment:
    """One piece of the graph, a model of its own.

    Attributes:
        model: its inputs are inputs of the graph, values of earlier segments and attention results, by their names.
        attention: the node that comes after it; None after the last.
    """

    model: ir.Model
    attention: ir.Node | None

    @property
    def inputs(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.outputs]


def split_at_plugins(model: ir.Model) -> list[Segment]:
    """Cut `model` at its attention nodes. The segments share its weights; `model` itself is left as it is.

    Raises:
        BuildError: the attention nodes do not follow one another, so there is no chain.
    """
    stages = _stages(model)
    attentions = attention_nodes(model)
    for i, node in enumerate(attentions):
        if stages[node] != i:
            raise BuildError(
                f"layer {node.attributes['layer'].as_int()} does not come after the one before it: the graph cannot be "
                "cut into a chain at its attention nodes"
            )
    count = len(attentions) + 1
    members = _members(model, stages, count)
    return [
        Segment(_extract(model, nodes, stage), attentions[stage] if stage < len(attentions) else None)
        for stage, nodes in enumerate(members)
    ]


def _members(model: ir.Model, stages: dict[ir.Node, int], count: int) -> list[list[ir.Node]]:
    """The nodes of each segment, in the graph's order."""
    attentions = set(attention_nodes(model))
    constant = _constant_nodes(model)
    wanted: dict[ir.Node, set[int]] = {}
    for node in reversed(list(model.graph)):
        if node in attentions:
            continue
        if node not in constant:
            wanted[node] = {stages[node]}
        else:
            users = {use.node for value in node.outputs for use in value.uses()}
            # An attention node that takes a constant gets it from the segment before it.
            wanted[node] = {stages[user] for user in users & attentions}.union(
                *(wanted[user] for user in users - attentions)
            )
    return [[node for node in model.graph if stage in wanted.get(node, ())] for stage in range(count)]


def _constant_nodes(model: ir.Model) -> set[ir.Node]:
    """The nodes whose every input comes from initializers."""
    found: set[ir.Node] = set()
    for node in model.graph:
        if all(v is None or v.is_initializer() or v.producer() in found for v in node.inputs):
            found.add(node)
    return found


def _stages(model: ir.Model) -> dict[ir.Node, int]:
    """How many attention nodes each node depends on, one after the other."""
    attentions = set(attention_nodes(model))
    stages: dict[ir.Node, int] = {}
    for node in model.graph:
        stage = 0
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None:
                stage = max(stage, stages[producer] + (producer in attentions))
        stages[node] = stage
    return stages


def _extract(model: ir.Model, nodes: list[ir.Node], stage: int) -> ir.Model:
    """`nodes` as a model: inputs are what others make, outputs are what others use."""
    import onnx_ir as ir

    mine = set(nodes)
    copies: dict[ir.Value, ir.Value] = {}
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []

    def copy(value: ir.Value) -> ir.Value:
        kind = None if value.dtype is None else ir.TensorType(value.dtype)  # its own: setting a dtype changes it
        made = ir.Value(name=value.name, type=kind, shape=value.shape, const_value=value.const_value)
        copies[value] = made
        return made

    cloned: list[ir.Node] = []
    for node in nodes:
        values: list[ir.Value | None] = []
        for value in node.inputs:
            if value is not None and value not in copies:
                (initializers if value.is_initializer() else inputs).append(copy(value))
            values.append(None if value is None else copies[value])
        clone = ir.Node(
            node.domain,
            node.op_type,
            values,
            list(node.attributes.values()),
            outputs=[copy(value) for value in node.outputs],
            name=node.name,
        )
        cloned.append(clone)
    finals = set(model.graph.outputs)
    attentions = attention_nodes(model)
    constant = _constant_nodes(model)

    def leaves(value: ir.Value, node: ir.Node) -> bool:
        """Whether another segment, or the attention node after this one, uses a value of this one's `node`."""
        users = {use.node for use in value.uses()} - mine
        if node in constant:  # every segment has its own
            return any(user in users for user in attentions[stage : stage + 1])
        return bool(users)

    outputs = [copies[value] for node in nodes for value in node.outputs if value in finals or leaves(value, node)]
    graph = ir.Graph(
        inputs, outputs, nodes=cloned, initializers=initializers, opset_imports=dict(model.opset_imports),
        name=f"segment{stage}",
    )  # fmt: skip
    return ir.Model(graph, ir_version=model.ir_version)
