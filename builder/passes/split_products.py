"""A merged product taken apart again, where its parts cannot share one storage format."""

from __future__ import annotations

import onnx_ir as ir

from builder.passes.graph import Editor, dims, replace
from builder.passes.matrices import SIZES, Matrix
from builder.weights import lazy, static_shape


def split(editor: Editor, matrix: Matrix) -> None:
    """`MatMul(x, [W1; W2]^T)` -> `Concat(MatMul(x, W1^T), MatMul(x, W2^T))`, in place.

    `matrix` came from `merge_products`: stored `[out, in]`, its parts one below the other.
    """
    assert matrix.axis == 0
    sizes = [int(size) for size in matrix.value.metadata_props[SIZES].split(",")]
    columns = static_shape(matrix.value)[1]
    (turn,) = {use.node for use in matrix.value.uses()}
    pieces: list[ir.Value] = []
    start = 0
    for name, size in zip(matrix.parts, sizes, strict=True):
        tensor, first = matrix.tensor, start

        def compute(first: int = first, size: int = size, tensor: ir.TensorProtocol = tensor):
            return tensor.numpy()[first : first + size]

        pieces.append(editor.initializer(name, lazy(name, tensor.dtype, (size, columns), compute)))
        start += size
    for use in list(turn.outputs[0].uses()):
        product = use.node
        data, shape = product.inputs[0], dims(product.outputs[0])
        assert shape is not None
        results = []
        for piece, size in zip(pieces, sizes, strict=True):
            turned = editor.node(product, "Transpose", [piece], (columns, size), attributes={"perm": [1, 0]})
            results.append(editor.node(product, "MatMul", [data, turned], (*shape[:-1], size)))
        joined = editor.node(product, "Concat", results, shape, attributes={"axis": -1})
        replace(product.outputs[0], joined)
        editor.graph.remove(product, safe=True)
    editor.graph.remove(turn, safe=True)
    del editor.graph.initializers[matrix.value.name or ""]
