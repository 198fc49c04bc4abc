"""The weights that fill a model: the matrices of products, and embedding tables."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx_ir as ir

from builder.passes.graph import dims, weight

ORIGINS = "plancast.origins"  # metadata of a merged weight: the names that it was made of, by comma


class Matrix(NamedTuple):
    """A weight `[out, in]` or `[in, out]`, and its axis of output channels (an embedding's rows)."""

    value: ir.Value
    tensor: ir.TensorProtocol
    axis: int

    @property
    def names(self) -> list[str]:
        """Its name, and those of the weights that were merged into it."""
        return [self.value.name or "", *filter(None, self.value.metadata_props.get(ORIGINS, "").split(","))]


def matrices(model: ir.Model, skip: tuple[str, ...] = ()) -> list[Matrix]:
    """Every matrix of `model` in the order of use, without those with a name that a shell pattern of `skip` matches."""
    found = []
    for value in model.graph.initializers.values():
        tensor, shape = weight(value), dims(value)
        if tensor is None or shape is None or len(shape) != 2 or not tensor.dtype.is_floating_point():
            continue
        axes = {_output_axis(use.node, use.idx) for use in value.uses()}
        axis = next(iter(axes), None)
        if len(axes) != 1 or axis is None:
            continue
        matrix = Matrix(value, tensor, axis)
        if not any(fnmatchcase(name, pattern) for name in matrix.names for pattern in skip):
            found.append(matrix)
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
