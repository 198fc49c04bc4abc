"""Several matrix products of one input become one, with the weights side by side: fewer, larger products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from builder.passes.graph import Editor, dims, made_by, only_user, replace, weight
from builder.passes.matrices import ORIGINS, SIZES
from builder.weights import lazy, static_shape


class Product(NamedTuple):
    """`x W^T (+ bias)`: W `[out, in]`, and the value that comes out."""

    node: ir.Node
    data: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    output: ir.Value

    @property
    def size(self) -> int:
        """Output channels."""
        return static_shape(self.weight)[0]


def product(node: ir.Node | None) -> Product | None:
    """The product that a MatMul makes with an f32 weight of its own, stored `[out, in]`; None for any other."""
    if node is None or node.op_type != "MatMul" or node.domain:
        return None
    transpose = made_by(node.inputs[1], "Transpose")
    if transpose is None or only_user(transpose.outputs[0]) is not node or node.inputs[0] is None:
        return None
    matrix = transpose.inputs[0]
    tensor = weight(matrix)
    if matrix is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or only_user(matrix) is not transpose:
        return None
    if list(transpose.attributes["perm"].as_ints()) != [1, 0]:
        return None
    output, bias = node.outputs[0], None
    user = only_user(output)
    if user is not None and user.op_type == "Add":
        other = user.inputs[1] if user.inputs[0] is output else user.inputs[0]
        if other is not None and weight(other) is not None and dims(other) == (static_shape(matrix)[0],):
            output, bias = user.outputs[0], other
    return Product(node, node.inputs[0], matrix, bias, output)


def merge(editor: Editor, products: Sequence[Product], label: str) -> None:
    """One product in place of several of the same input; `label` names the weight (`qkv_proj`). Splits the result."""
    first = min((p.node for p in products), key=list(editor.graph).index)
    data, sizes = products[0].data, [p.size for p in products]
    lead = (dims(data) or ())[:-1]
    total, columns = sum(sizes), static_shape(products[0].weight)[1]
    names = [p.weight.name or "" for p in products]
    stem = f"{names[0].rpartition('.')[0].rpartition('.')[0]}.{label}"

    tensors = [p.weight.const_value for p in products]
    merged = editor.initializer(
        f"{stem}.weight",
        lazy(
            f"{stem}.weight",
            ir.DataType.FLOAT,
            (total, columns),
            lambda: np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None]),
        ),
    )
    merged.metadata_props[ORIGINS] = ",".join(names)
    merged.metadata_props[SIZES] = ",".join(map(str, sizes))
    turned = editor.node(first, "Transpose", [merged], (columns, total), attributes={"perm": [1, 0]})
    result = editor.node(first, "MatMul", [data, turned], (*lead, total))
    if any(p.bias is not None for p in products):
        result = editor.node(first, "Add", [result, _merged_bias(editor, products, stem)], (*lead, total))
    parts = editor.node(
        first,
        "Split",
        [result, editor.constant(sizes, "split")],
        [(*lead, size) for size in sizes],
        attributes={"axis": -1},
        outputs=len(sizes),
    )
    for old, part in zip(products, parts, strict=True):
        replace(old.output, part)


def _merged_bias(editor: Editor, products: Sequence[Product], stem: str) -> ir.Value:
    """The biases side by side, zeros for a product that has none."""
    pieces = [(p.bias.const_value if p.bias is not None else None, p.size) for p in products]

    def compute() -> np.ndarray:
        return np.concatenate(
            [np.zeros(size, np.float32) if tensor is None else tensor.numpy() for tensor, size in pieces]
        )

    total = sum(size for _, size in pieces)
    return editor.initializer(f"{stem}.bias", lazy(f"{stem}.bias", ir.DataType.FLOAT, (total,), compute))


def sources(value: ir.Value | None, through: frozenset[str], depth: int = 8) -> Iterator[ir.Node]:
    """The MatMul nodes that `value` comes from, by way of operators in `through`."""
    node = value.producer() if value is not None else None
    if node is None or depth == 0:
        return
    if node.op_type == "MatMul":
        yield node
    elif node.op_type in through and not node.domain:
        for operand in node.inputs:
            yield from sources(operand, through, depth - 1)
