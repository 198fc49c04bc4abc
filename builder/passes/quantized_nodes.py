"""The nodes that stand for one quantized weight: products through DequantizeLinear, rows of a table looked up.

Forms, for a weight `[N, K]` in groups of `g` columns (G = K / g):

    a scale a channel    DequantizeLinear(q [N, K], scale [N], zero [N]?, axis=0)
    a scale a group      DequantizeLinear(q [N, K], scale [N, G], zero [N, G]?, axis=1, block_size=g)
    with minima          + MatMul(sum of x over each group [T, G], minimum^T [G, N])
    columns reordered    x becomes Gather(x, order, axis=-1)
    a table in groups    Gather(q) [T, K], Gather(scale) [T, G], ...: multiplied row by row. Backends read a table
                         behind a blocked DequantizeLinear wrongly, or turn all of it into f32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from builder.passes.graph import Editor, dims, replace
from builder.passes.matrices import Matrix
from builder.weights import lazy
from zoo.quantized import QuantizedRef, QuantizedWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPES = {"int8": "INT8", "uint8": "UINT8", "int4": "INT4", "uint4": "UINT4", "fp8": "FLOAT8E4M3FN"}
_NUMPY = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4, "fp8": ml_dtypes.float8_e4m3fn}


def emit(editor: Editor, matrix: Matrix, ref: QuantizedRef) -> None:
    """Let every user of `matrix` compute with the quantized weight instead. Nothing is read yet."""
    value, axis = matrix.value, matrix.axis
    per_channel = ref.format.group == ref.shape[1]
    plain = per_channel and not ref.format.minimum and ref.format.order is None
    if matrix.is_table and not (plain and ref.format.kind in ("int8", "uint8", "fp8")):
        ref = _in_bytes(ref)  # nobody gathers 4-bit rows
    assert not (matrix.is_table and ref.format.order), "no format reorders the columns of a table"
    tensors = _Tensors(editor, value.name or "weight", ref, axis)
    uses = list(value.uses())
    value.const_value, value.shape, value.dtype = tensors.values, tensors.values.shape, tensors.values.dtype
    restored: ir.Value | None = None
    order = {node: index for index, node in enumerate(editor.graph)}
    for node, index in sorted(uses, key=lambda use: order[use.node]):
        if node.op_type == "Gather" and not plain:
            _look_up(editor, node, value, tensors)
            continue
        if restored is None:
            restored = _dequantized(editor, node, value, tensors)
        node.replace_input_with(index, restored)
        if node.op_type == "Transpose":
            for use in list(node.outputs[0].uses()):
                _complete_product(editor, use.node, tensors)
        elif node.op_type != "Gather":
            _complete_product(editor, node, tensors)


class _Tensors:
    """The initializers of one quantized weight, made as they are asked for and shared by its users."""

    def __init__(self, editor: Editor, name: str, ref: QuantizedRef, axis: int):
        self.editor, self.name, self.ref, self.axis = editor, name, ref, axis
        rows, columns = ref.shape
        self.groups = columns // ref.format.group
        self.load = _remembering(ref.load)
        self.dtype = ir.DataType[_DTYPES[ref.format.kind]]
        self.values = self._lazy(name, self.dtype, (rows, columns), lambda weight: _typed(weight, weight.values))

    def _lazy(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], pick: Callable[[QuantizedWeight], NDArray]
    ) -> ir.LazyTensor:
        """`pick`ed from the weight when it is read; turned round where the weight is stored `[in, out]`."""
        turned = self.axis == 1 and len(shape) == 2
        stored = shape[::-1] if turned else shape

        def compute() -> NDArray:
            array = pick(self.load()).reshape(shape)
            return array.T if turned else array

        return lazy(name, dtype, stored, compute)

    @functools.cached_property
    def scale(self) -> ir.Value:
        return self._add("scale", ir.DataType.FLOAT, lambda weight: weight.scale)

    @functools.cached_property
    def zero(self) -> ir.Value | None:
        if not self.ref.format.zero:
            return None

        def pick(weight: QuantizedWeight) -> NDArray:
            assert weight.zero is not None
            return _typed(weight, weight.zero)

        return self._add("zero_point", self.dtype, pick)

    @functools.cached_property
    def minimum(self) -> ir.Value:
        """f32 `[G, N]`, as a product takes it."""
        shape = (self.groups, self.ref.shape[0])

        def compute() -> NDArray:
            minimum = self.load().minimum
            assert minimum is not None
            return minimum.T

        name = f"{self.name}.minimum"
        return self.editor.initializer(name, lazy(name, ir.DataType.FLOAT, shape, compute))

    @functools.cached_property
    def order(self) -> ir.Value:
        def compute() -> NDArray:
            order = self.load().order
            assert order is not None
            return order.astype(np.int64)

        name = f"{self.name}.order"
        return self.editor.initializer(name, lazy(name, ir.DataType.INT64, (self.ref.shape[1],), compute))

    def _add(self, suffix: str, dtype: ir.DataType, pick: Callable[[QuantizedWeight], NDArray]) -> ir.Value:
        shape = (self.ref.shape[0],) if self.groups == 1 else (self.ref.shape[0], self.groups)
        name = f"{self.name}.{suffix}"
        return self.editor.initializer(name, self._lazy(name, dtype, shape, pick))


def _dequantized(editor: Editor, at: ir.Node, value: ir.Value, tensors: _Tensors) -> ir.Value:
    attributes = {"axis": tensors.axis}
    if tensors.groups > 1:
        attributes = {"axis": 1 - tensors.axis, "block_size": tensors.ref.format.group}
    inputs = [value, tensors.scale, *([tensors.zero] if tensors.zero is not None else [])]
    shape = dims(value)
    assert shape is not None
    return editor.node(at, "DequantizeLinear", inputs, shape, attributes=attributes, dtype=ir.DataType.FLOAT)


def _complete_product(editor: Editor, product: ir.Node, tensors: _Tensors) -> None:
    """What a product needs beside the dequantized values: its input's columns in order, and the minima's term."""
    data = product.inputs[0]
    shape, columns = dims(data) if data is not None else None, tensors.ref.shape[1]
    if data is None or shape is None:
        return
    if tensors.ref.format.order is not None:
        data = editor.node(product, "Gather", [data, tensors.order], shape, attributes={"axis": -1})
        product.replace_input_with(0, data)
    if not tensors.ref.format.minimum:
        return
    assert data is not None
    lead, result = shape[:-1], dims(product.outputs[0])
    assert result is not None
    blocks = editor.reshape(product, data, (*lead, tensors.groups, columns // tensors.groups))
    axes = editor.constant([-1], "axes")
    sums = editor.node(product, "ReduceSum", [blocks, axes], (*lead, tensors.groups), attributes={"keepdims": 0})
    main = editor.node(product, "MatMul", [data, product.inputs[1]], result)
    term = editor.node(product, "MatMul", [sums, tensors.minimum], result)
    replace(product.outputs[0], editor.node(product, "Add", [main, term], result))
    editor.graph.remove(product, safe=True)


def _look_up(editor: Editor, gather: ir.Node, value: ir.Value, tensors: _Tensors) -> None:
    """The rows of a table, dequantized one by one."""
    ids, shape = gather.inputs[1], dims(gather.outputs[0])
    assert ids is not None
    assert shape is not None
    lead, groups, group = shape[:-1], tensors.groups, tensors.ref.format.group

    def rows(table: ir.Value, width: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        found = editor.node(gather, "Gather", [table, ids], (*lead, *width), attributes={"axis": 0}, dtype=dtype)
        if dtype != ir.DataType.FLOAT:
            found = editor.node(
                gather, "Cast", [found], (*lead, *width), attributes={"to": ir.DataType.FLOAT}, dtype=ir.DataType.FLOAT
            )
        return found

    def columns(found: ir.Value) -> ir.Value:
        return editor.reshape(gather, found, (*lead, groups, 1))

    whole = (*lead, groups, group)
    width = (groups,) if groups > 1 else ()  # a scale a channel lies as a vector: [T] rather than [T, 1]
    blocks = editor.reshape(gather, rows(value, (groups * group,), tensors.dtype), whole)
    if tensors.zero is not None:
        blocks = editor.node(gather, "Sub", [blocks, columns(rows(tensors.zero, width, tensors.dtype))], whole)
    blocks = editor.node(gather, "Mul", [blocks, columns(rows(tensors.scale, width, ir.DataType.FLOAT))], whole)
    if tensors.ref.format.minimum:
        turned = (tensors.ref.shape[0], groups)
        minimum = editor.node(gather, "Transpose", [tensors.minimum], turned, attributes={"perm": [1, 0]})
        blocks = editor.node(gather, "Add", [blocks, columns(rows(minimum, (groups,), ir.DataType.FLOAT))], whole)
    replace(gather.outputs[0], editor.reshape(gather, blocks, shape))
    editor.graph.remove(gather, safe=True)


def _in_bytes(ref: QuantizedRef) -> QuantizedRef:
    """The same weight with 4-bit values held in 8."""
    kinds = {"int4": "int8", "uint4": "uint8"}
    if ref.format.kind not in kinds:
        return ref
    wide = dataclasses.replace(ref.format, kind=kinds[ref.format.kind])
    return QuantizedRef(wide, ref.shape, lambda: ref.load().widened())


def _typed(weight: QuantizedWeight, array: NDArray) -> NDArray:
    """The array in the dtype that ONNX's tensor of this kind has in NumPy."""
    if weight.kind == "fp8":
        return array.view(ml_dtypes.float8_e4m3fn)
    return array.astype(_NUMPY[weight.kind]) if weight.kind in _NUMPY else array


def _remembering(load: Callable[[], QuantizedWeight]) -> Callable[[], QuantizedWeight]:
    """`load`, its last result kept until another weight is read: values, scale and zero point are read in a row."""

    def read() -> QuantizedWeight:
        if _last[0] is not read:
            _last[:] = [read, load()]
        return _last[1]  # type: ignore[return-value]

    return read


_last: list[object] = [None, None]
