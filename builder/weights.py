"""Weights as lazy tensors: they stay in the checkpoint's files until something serializes them, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

    from zoo.checkpoint import TensorRef

# safetensors dtype -> name in onnx_ir.DataType, for the dtypes that a weight may have.
FLOAT_DTYPES = {"F64": "DOUBLE", "F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16"}


def external(name: str, ref: TensorRef) -> ir.ExternalTensor:
    """The tensor that lies in a safetensors file, in place: dtype and shape of the file. Links are resolved."""
    import onnx_ir as ir

    path = ref.file.resolve()  # every ONNX loader refuses a symlink, and the hub's cache is full of them
    return ir.ExternalTensor(
        path.name,
        ref.offset,
        ref.nbytes,
        ir.DataType[FLOAT_DTYPES[ref.dtype.upper()]],
        shape=ir.Shape(ref.shape),
        name=name,
        base_dir=path.parent,
    )


def static_shape(tensor: ir.TensorProtocol | ir.Value) -> tuple[int, ...]:
    """The dimensions of a weight, which are all known."""
    assert tensor.shape is not None
    return tuple(int(str(dim)) for dim in tensor.shape)


def lazy(name: str, dtype: ir.DataType, shape: Sequence[int], compute: Callable[[], np.ndarray]) -> ir.LazyTensor:
    """A tensor `[shape]` of `dtype` that `compute` makes each time it is read; nothing is kept."""
    import onnx_ir as ir

    def evaluate() -> ir.Tensor:
        array = np.ascontiguousarray(compute())
        assert array.shape == tuple(shape), f"{name}: computed {array.shape}, declared {tuple(shape)}"
        return ir.Tensor(array, dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)


def cast(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    """`tensor` in another float dtype, rounded to nearest even; itself if it has that dtype already."""
    if tensor.dtype == dtype:
        return tensor
    numpy_dtype: Any = dtype.numpy()
    return lazy(tensor.name or "", dtype, static_shape(tensor), lambda: tensor.numpy().astype(numpy_dtype))
