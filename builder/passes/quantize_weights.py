"""Quantized weights as `DequantizeLinear` (opset 21+): one graph serves OpenVINO, TensorRT and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from builder.passes.base import GraphPass
from builder.passes.conditions import f32_activations, well_formed
from builder.passes.graph import Editor
from builder.passes.matrices import Matrix, head_names, matrices
from builder.passes.quantized_nodes import emit
from builder.passes.split_products import split
from builder.quantization.rounding import quantize
from builder.quantization.scheme import FLOATS, Scheme, scheme_of
from builder.weights import static_shape
from runtime.errors import BuildError
from zoo.quantized import QuantizedRef, concatenate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from builder.recipe import Recipe


class QuantizeWeights(GraphPass):
    """Each matrix gets the scheme that the recipe gives its name; an embedding tied to the head shares the head's.

    `quantized` holds what a calibrated method or the checkpoint itself made of a weight, by its name; the others are
    rounded to nearest. A merged product whose parts came in different formats is taken apart again.
    """

    name = "quantize_weights"
    requires = (well_formed, f32_activations)
    ensures = (well_formed, f32_activations)

    def __init__(self, quantized: Mapping[str, QuantizedRef] | None = None):
        self.quantized = quantized or {}

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        heads = head_names(model)
        for matrix in matrices(model):
            if len(matrix.parts) > 1 and len({self._format(name, matrix, recipe) for name in matrix.parts}) > 1:
                split(editor, matrix)
        done = 0
        for matrix in matrices(model):
            wide = matrix.is_table or not heads.isdisjoint(matrix.names)
            ref = self._ref(matrix, scheme_of(recipe.weights, matrix.names, wide=wide))
            if ref is not None:
                emit(editor, matrix, ref)
                done += 1
        return done

    def _format(self, name: str, matrix: Matrix, recipe: Recipe) -> object:
        """What part `name` of a merged matrix will be stored as: equal for parts that can stay together."""
        if name in self.quantized:
            return self.quantized[name].format
        # Rounded weights follow the patterns that match any of the names, as one.
        return scheme_of(recipe.weights, matrix.names)

    def _ref(self, matrix: Matrix, scheme: Scheme) -> QuantizedRef | None:
        """What to store in place of `matrix`, not read yet; None where it stays a float."""
        columns, rows = (static_shape(matrix.value)[axis] for axis in (1 - matrix.axis, matrix.axis))
        parts = [self.quantized[name] for name in matrix.parts if name in self.quantized]
        if parts:
            return QuantizedRef(parts[0].format, (rows, columns), lambda: concatenate([part.load() for part in parts]))
        if scheme.dtype in FLOATS:
            return None
        scheme.check(matrix.value.name or "a weight", columns)
        if matrix.is_table and scheme.dtype == "fp8" and scheme.group:
            raise BuildError(
                f"{matrix.value.name} is an embedding, and no backend looks up fp8 rows in groups of {scheme.group}; "
                "override it with group_size: channel, or with dtype: int8"
            )
        tensor, axis = matrix.tensor, matrix.axis

        def load() -> NDArray[np.floating]:
            array = tensor.numpy()
            return array if axis == 0 else array.T

        return QuantizedRef(scheme.format(columns), (rows, columns), lambda: quantize(load(), scheme))
