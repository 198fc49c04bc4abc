"""Small tools over onnx_ir that passes share: constants, shapes, replacing and inserting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from numpy.typing import NDArray

Dim = int | str
_SMALL = 4096  # elements: more than any shape, axis list or scalar, less than any weight that matters


def dims(value: ir.Value) -> tuple[Dim, ...] | None:
    """The dimensions of `value`: integers, or symbols such as `T`; None where the shape is unknown."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The array of a small constant; None for anything computed, for an input and for a weight."""
    if value is None or value.const_value is None or value.producer() is not None or value.is_graph_input():
        return None
    return value.const_value.numpy() if value.const_value.size <= _SMALL else None


def scalar(value: ir.Value | None) -> float | int | None:
    """The number in a constant of one element."""
    array = constant(value)
    return array.item() if array is not None and array.size == 1 else None


def weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, read or unread; None for anything else."""
    if value is None or value.producer() is not None or not value.is_initializer():
        return None
    return value.const_value


def only_user(value: ir.Value) -> ir.Node | None:
    """The node that alone uses `value`, once; None if there are several or if it is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it is an ONNX node of this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain in ("", "ai.onnx") else None


class Editor:
    """Adds nodes to one graph: each method makes a node before `at`, typed and shaped, and returns its output."""

    def __init__(self, model: ir.Model):
        self.graph = model.graph
        self._names: dict[str, int] = {}

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Add `tensor` as an initializer called `name`, or `name_1` and so on where that is taken."""
        free = name
        while free in self.graph.initializers:
            self._names[name] = self._names.get(name, 0) + 1
            free = f"{name}_{self._names[name]}"
        value = ir.Value(
            name=free, type=ir.TensorType(tensor.dtype), shape=ir.Shape([int(str(d)) for d in tensor.shape])
        )
        tensor.name = free
        value.const_value = tensor
        self.graph.initializers[free] = value
        return value

    def constant(self, array: NDArray[Any] | Sequence[int], name: str = "const") -> ir.Value:
        """An initializer of a small array; a list of integers becomes i64. Equal ones are shared."""
        values = np.asarray(array, np.int64 if not isinstance(array, np.ndarray) else None)
        label = f"{name}_{'x'.join(map(str, values.reshape(-1).tolist()))}" if values.size <= 8 else name
        existing = self.graph.initializers.get(label)
        found = constant(existing) if existing is not None else None
        if existing is not None and found is not None and found.dtype == values.dtype and np.array_equal(found, values):
            return existing
        return self.initializer(label, ir.Tensor(values))

    def node(
        self,
        at: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[Dim] | Sequence[Sequence[Dim]],
        *,
        attributes: dict[str, Any] | None = None,
        dtype: ir.DataType | None = None,
        outputs: int = 1,
    ) -> Any:
        """Make a node before `at`. `shape` is the output's (a list of shapes if `outputs` > 1).

        Returns the output, or the list of outputs.
        """
        node = ir.node(op_type, list(inputs), attributes=attributes or {}, num_outputs=outputs)
        first = next(value for value in inputs if value is not None)
        shapes: Any = [shape] if outputs == 1 else shape
        for value, dimensions in zip(node.outputs, shapes, strict=True):
            value.type = ir.TensorType(dtype or first.dtype or ir.DataType.FLOAT)
            value.shape = ir.Shape(dimensions)
        self.graph.insert_before(at, node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def reshape(self, at: ir.Node, value: ir.Value, shape: Sequence[Dim]) -> ir.Value:
        """`value` in another shape, of which one dimension at most is a symbol; itself if it has that shape."""
        if dims(value) == tuple(shape):
            return value
        target = [dim if isinstance(dim, int) else -1 for dim in shape]
        return self.node(at, "Reshape", [value, self.constant(target, "shape")], shape)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every user of `old`, the graph's outputs among them, use `new`, which takes over the name of an output."""
    was_output = old.is_graph_output()
    name = old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if was_output:
        old.name = None
        new.name = name


def remove(nodes: Iterable[ir.Node]) -> None:
    """Take nodes out of the graph whose outputs nobody uses."""
    for node in nodes:
        if node.graph is not None:
            node.graph.remove(node, safe=True)
