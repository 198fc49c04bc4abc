"""int8 weights: round to nearest, symmetric, one scale an output channel, as `DequantizeLinear` (opset 21)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from builder.passes.base import GraphPass
from builder.passes.conditions import f32_activations, well_formed
from builder.passes.graph import Editor
from builder.passes.matrices import Matrix, matrices
from builder.weights import lazy, static_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.recipe import Recipe

_LEVELS = 127  # -128 stays unused, so that negation is exact


class QuantizeWeights(GraphPass):
    """Each matrix becomes int8 behind `DequantizeLinear`; an embedding tied to the head shares the head's.

    Costs 0.003 KL at 135M parameters (measured). `weights.skip` leaves weights in f32.
    """

    name = "quantize_weights"
    requires = (well_formed, f32_activations)
    ensures = (well_formed, f32_activations)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        if recipe.weights.dtype != "int8":
            return 0
        editor = Editor(model)
        found = matrices(model, recipe.weights.skip)
        for matrix in found:
            _quantize(editor, matrix)
        return len(found)


def channel_scales(weight: NDArray[np.floating], axis: int) -> NDArray[np.float32]:
    """The scale of each channel along `axis`, f32 `[channels]`: its largest magnitude / 127 (1 where all are 0).

    No scale is below the smallest normal number: a denormal one has no digits left to be a unit of anything.
    """
    others = tuple(i for i in range(weight.ndim) if i != axis)
    largest = np.abs(weight.astype(np.float32)).max(axis=others)
    scales = np.maximum(largest / np.float32(_LEVELS), np.finfo(np.float32).tiny)
    return np.where(largest > 0, scales, np.float32(1)).astype(np.float32)


def quantize(weight: NDArray[np.floating], axis: int) -> NDArray[np.int8]:
    """`weight` in units of its channels' scales, rounded to nearest even: int8 of the same shape."""
    shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
    scaled = weight.astype(np.float32) / channel_scales(weight, axis).reshape(shape)
    return np.clip(np.rint(scaled), -_LEVELS, _LEVELS).astype(np.int8)


def _quantize(editor: Editor, matrix: Matrix) -> None:
    value, tensor, axis = matrix
    shape = static_shape(value)
    uses = list(value.uses())
    name = value.name or "weight"

    scale = editor.initializer(
        f"{name}.scale",
        lazy(f"{name}.scale", ir.DataType.FLOAT, (shape[axis],), lambda: channel_scales(tensor.numpy(), axis)),
    )
    value.const_value = lazy(name, ir.DataType.INT8, shape, lambda: quantize(tensor.numpy(), axis))
    value.dtype = ir.DataType.INT8
    first = min((use.node for use in uses), key=list(editor.graph).index)
    restored = editor.node(
        first, "DequantizeLinear", [value, scale], shape, attributes={"axis": axis}, dtype=ir.DataType.FLOAT
    )
    for node, index in uses:
        node.replace_input_with(index, restored)
