"""The weights that fill a model: the matrices of products, and embedding tables."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from builder.passes.graph import dims, weight

# Metadata of a merged weight: the names that it was made of, and their output channels, by comma.
ORIGINS, SIZES = "plancast.origins", "plancast.sizes"


class Matrix(NamedTuple):
    """A weight `[out, in]` or `[in, out]`, and its axis of output channels (an embedding's rows)."""

    value: ir.Value
    tensor: ir.TensorProtocol
    axis: int

    @property
    def names(self) -> list[str]:
        """Its name, and those of the weights that were merged into it."""
        return list(dict.fromkeys([self.value.name or "", *self.parts]))

    @property
    def parts(self) -> list[str]:
        """The names of the weights that it holds, one below the other: its own, or those merged into it."""
        return self.value.metadata_props.get(ORIGINS, self.value.name or "").split(",")

    @property
    def is_table(self) -> bool:
        """Whether rows of it are looked up: an embedding, tied to the head or not."""
        return any(use.node.op_type == "Gather" for use in self.value.uses())


def head_names(model: ir.Model) -> set[str]:
    """The name of the weight of the product that makes the logits."""
    for node in reversed(list(model.graph)):
        if node.op_type in ("MatMul", "Gemm") and not node.domain:
            value = node.inputs[1]
            while value is not None and (maker := value.producer()) is not None:
                value = maker.inputs[0]
            return {value.name} if value is not None and value.name else set()
    return set()


def matrices(model: ir.Model) -> list[Matrix]:
    """Every matrix of `model` that is still a float, in the order of use."""
    found = []
    for value in model.graph.initializers.values():
        tensor, shape = weight(value), dims(value)
        if tensor is None or shape is None or len(shape) != 2 or not tensor.dtype.is_floating_point():
            continue
        axes = {_output_axis(use.node, use.idx) for use in value.uses()}
        axis = next(iter(axes), None)
        if len(axes) != 1 or axis is None:
            continue
        found.append(Matrix(value, tensor, axis))
    return found


def _output_axis(node: ir.Node, index: int) -> int | None:
    """The axis of a weight that a use takes as output channels; None where the use is not one of a matrix."""
    if node.domain:
        return None
    if node.op_type == "MatMul" and index == 1:
        return 1
    if node.op_type == "Gemm" and index == 1 and not node.attributes.get_int("transA", 0):
        return 0 if node.attributes.get_int("transB", 0) else 1
    if node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0:
        return 0
    if node.op_type == "Transpose":
        users = list(node.outputs[0].uses())
        products = users and all(use.node.op_type == "MatMul" and use.idx == 1 for use in users)
        return 0 if products and list(node.attributes["perm"].as_ints()) == [1, 0] else None
    return None
