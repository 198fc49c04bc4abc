"""Lay every activation out tokens first.

A trace sees one sequence: activations are `[1, T, hidden]`, heads `[1, H, T, D]`, with transposes between. An
engine's batch is flat, so the leading 1 says nothing, and `[T, H, D]` serves every operator that works within a token.
After this pass an activation's first axis is `T` (or `R`, the rows that want logits), and the transposes around heads
are gone.

Each node is written again in the new layout by the rule of its kind. One that has no rule keeps its layout, between
conversions: right, and seen in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, tokens_first, well_formed
from builder.passes.graph import Dim, Editor, constant, dims, replace
from builder.passes.layout import Layout, frame_axes, token_axis, tokens_first_dims
from builder.tracing.checks import POINTWISE

if TYPE_CHECKING:
    from builder.recipe import Recipe

_ALONG_AXIS = {
    "Concat": -1, "Softmax": -1, "LogSoftmax": -1, "Split": 0, "TopK": -1, "ArgMax": 0, "ArgMin": 0,
    "ScatterElements": 0, "GatherElements": 0, "LayerNormalization": -1, "RMSNormalization": -1,
}  # fmt: skip
_POINTWISE = POINTWISE - {"Expand", "Transpose", "Squeeze", "Unsqueeze", "ConstantOfShape", "OneHot"}
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


class TokensFirst(GraphPass):
    """`[1, T, hidden]` and `[1, H, T, D]` become `[T, hidden]` and `[T, H, D]`; transposes of heads disappear."""

    name = "tokens_first"
    requires = (well_formed, flat_attention)
    ensures = (well_formed, flat_attention, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        nodes = list(model.graph)
        layout = Layout(Editor(model))
        changed = 0
        for node in nodes:
            shapes = [dims(value) for value in (*node.inputs, *node.outputs) if value is not None]
            if all(token_axis(shape) is None for shape in shapes):
                continue
            changed += _Rewriter(layout, node).run()
        for output in list(model.graph.outputs):
            form = layout.form(output, nodes[-1])
            if form is not output:
                replace(output, form)
        common.RemoveUnusedNodesPass()(model)
        return changed


class _Rewriter:
    """Writes one node again."""

    def __init__(self, layout: Layout, node: ir.Node):
        self.layout, self.editor, self.node = layout, layout.editor, node
        self.inputs: list[ir.Value | None] = list(node.inputs)
        self.output = node.outputs[0]
        self.shape: tuple[Dim, ...] = dims(self.output) or ()

    def run(self) -> bool:
        """Whether the node got another layout."""
        if self._is_tokens_first():
            for index, value in enumerate(self.inputs):
                if value is not None:
                    self.node.replace_input_with(index, self.layout.form(value, self.node))
            return False
        op = self.node.op_type
        done = False
        if token_axis(self.shape) is not None:
            if op in _POINTWISE:
                done = self._broadcast()
            elif op in _ALONG_AXIS:
                done = self._along([self.node.attributes.get_int("axis", _ALONG_AXIS[op])])
            elif op in _RESHAPES:
                done = self._reshape()
            else:
                rule = getattr(self, f"_{op.lower()}", None)
                done = rule() if rule is not None and self.node.domain == "" else False
        if not done:
            self._keep()
        return done

    def _is_tokens_first(self) -> bool:
        """Whether every value of the node already lies as it should."""
        for value in (*self.inputs, *self.node.outputs):
            shape = dims(value) if value is not None else None
            if shape is not None and token_axis(shape) is not None and tokens_first_dims(shape) != shape:
                return False
        return True

    def _keep(self) -> None:
        """Run the node in its own layout, between conversions."""
        inputs = [self.layout.original(value, self.node) if value is not None else None for value in self.inputs]
        for index, value in enumerate(inputs):
            self.node.replace_input_with(index, value)

    def _emit(self, inputs: Sequence[ir.Value | None], shapes: Sequence[Sequence[Dim]], **attributes: Any) -> None:
        """The node again with other inputs, output shapes and attributes; its outputs become the tokens-first forms."""
        merged = {name: attribute.value for name, attribute in self.node.attributes.items()} | attributes
        many = len(self.node.outputs) > 1
        made = self.editor.node(
            self.node, self.node.op_type, inputs, shapes if many else shapes[0], attributes=merged,
            outputs=len(self.node.outputs),
        )  # fmt: skip
        for old, new in zip(self.node.outputs, made if many else [made], strict=True):
            new.type = old.type
            self.layout.set_form(old, new, self.node)

    def _broadcast(self) -> bool:
        frame = frame_axes(self.shape)
        inputs = self._in_frame(len(self.shape), frame)
        if inputs is None:
            return False
        self._emit(inputs, [[self.shape[axis] for axis in frame]])
        return True

    def _in_frame(self, rank: int, frame: list[int]) -> list[ir.Value | None] | None:
        """All inputs in the frame; None if one cannot be brought there."""
        made = [
            self.layout.in_frame(value, rank, frame, self.node) if value is not None else None for value in self.inputs
        ]
        missing = any(a is not None and b is None for a, b in zip(self.inputs, made, strict=True))
        return None if missing else made

    def _along(self, axes: Sequence[int], data_inputs: int | None = None) -> bool:
        """An operator that works along axes other than the tokens, on the first `data_inputs` inputs."""
        data = self.inputs[0]
        shape = dims(data) if data is not None else None
        if shape is None or token_axis(shape) is None:
            return False
        rank, token = len(shape), token_axis(shape)
        axes = [axis % rank for axis in axes]
        values = [v for v in (*self.inputs, *self.node.outputs) if v is not None and len(dims(v) or ()) == rank]
        if token in axes or any(token_axis(dims(v)) not in (None, token) for v in values):
            return False
        op = self.node.op_type
        frame = [token, *(i for i in range(rank) if i != token and self._kept(values, i, rank, axes))]
        if op.endswith("Normalization"):
            if axes != [rank - 1]:
                return False
            data_inputs = 1  # the scale goes with the last axis alone
        elif op in ("Split", "TopK"):
            data_inputs = 1
        count = len(self.inputs) if data_inputs is None else data_inputs
        inputs: list[ir.Value | None] = []
        for index, value in enumerate(self.inputs):
            moved = value
            if value is not None and index < count:
                moved = self.layout.in_frame(value, rank, frame, self.node)  # type: ignore[arg-type]
                if moved is None:
                    return False
            inputs.append(moved)
        shapes = []
        for value in self.node.outputs:
            result = dims(value)
            if result is None or len(result) != rank:
                return False
            shapes.append([result[axis] for axis in frame])  # type: ignore[index]
        new_axes = [frame.index(axis) for axis in axes]
        if op.startswith("Reduce") or op == "Slice":
            self._emit_axes(inputs, shapes, new_axes)
        else:
            axis = -1 if axes == [rank - 1] else new_axes[0]
            self._emit(inputs, shapes, axis=axis)
        return True

    @staticmethod
    def _kept(values: list[ir.Value], axis: int, rank: int, axes: Sequence[int]) -> bool:
        return axis == rank - 1 or axis in axes or any((dims(value) or ())[axis] != 1 for value in values)

    def _emit_axes(self, inputs: list[ir.Value | None], shapes: list[list[Dim]], axes: list[int]) -> None:
        """Axes stand in an input (Reduce*: the second, Slice: the fourth)."""
        position = 3 if self.node.op_type == "Slice" else 1
        inputs[position] = self.editor.constant(axes, "axes")
        self._emit(inputs, shapes)

    def _slice(self) -> bool:
        axes = constant(self.inputs[3]) if len(self.inputs) > 3 else None
        return axes is not None and self._along(axes.tolist(), data_inputs=1)

    def _reduce(self) -> bool:
        axes = constant(self.inputs[1]) if len(self.inputs) > 1 else None
        if axes is None or not self.node.attributes.get_int("keepdims", 1):
            return False
        return self._along(axes.tolist(), data_inputs=1)

    _reducemean = _reducesum = _reducemax = _reducemin = _reducel2 = _reduceprod = _reducesumsquare = _reduce

    def _reshape(self) -> bool:
        data = self.inputs[0]
        shape = dims(data) if data is not None else None
        if data is None or shape is None or token_axis(shape) is None:
            return False
        before = [[dim for dim in s[: token_axis(s)] if dim != 1] for s in (shape, self.shape)]
        if before[0] != before[1] or any(dim == 0 for dim in self.shape):
            return False
        form = self.layout.form(data, self.node)
        self.layout.set_form(self.output, form, self.node)
        return True

    def _transpose(self) -> bool:
        data = self.inputs[0]
        shape = dims(data) if data is not None else None
        if data is None or shape is None or token_axis(shape) is None:
            return False
        perm = list(self.node.attributes["perm"].as_ints())
        source = [axis for axis in frame_axes(shape) if shape[axis] != 1]
        target = [perm[axis] for axis in frame_axes(self.shape) if self.shape[axis] != 1]
        form = self.layout.form(data, self.node)
        if source != target:
            order = [source.index(axis) for axis in target]
            form = self.editor.reshape(self.node, form, [shape[axis] for axis in source])
            moved = [shape[axis] for axis in target]
            form = self.editor.node(self.node, "Transpose", [form], moved, attributes={"perm": order})
        self.layout.set_form(self.output, form, self.node)
        return True

    def _expand(self) -> bool:
        data = self.inputs[0]
        if data is None:
            return False
        frame = frame_axes(self.shape)
        form = self.layout.in_frame(data, len(self.shape), frame, self.node)
        if form is None or token_axis(dims(form)) is None:
            return False
        shape = [self.shape[axis] for axis in frame]
        if dims(form) != tuple(shape):
            counts = [dim if isinstance(dim, int) else 1 for dim in shape]
            form = self.editor.node(self.node, "Expand", [form, self.editor.constant(counts, "shape")], shape)
        self.layout.set_form(self.output, form, self.node)
        return True

    def _matmul(self) -> bool:
        data, matrix = self.inputs[0], self.inputs[1]
        shape, other = (dims(value) if value is not None else None for value in (data, matrix))
        if data is None or shape is None or other is None or len(other) != 2 or token_axis(other) is not None:
            return False
        if token_axis(shape) in (None, len(shape) - 1):
            return False
        form = self.layout.form(data, self.node)
        self._emit([form, matrix], [(*(dims(form) or ())[:-1], other[1])])
        return True

    def _gather(self) -> bool:
        data, indices = self.inputs
        axis = self.node.attributes.get_int("axis", 0)
        data_shape, index_shape = (dims(value) if value is not None else None for value in (data, indices))
        if data is None or indices is None or data_shape is None or index_shape is None:
            return False
        if token_axis(index_shape) is not None and token_axis(data_shape) is None and axis == 0:
            form = self.layout.form(indices, self.node)
            self._emit([data, form], [(*(dims(form) or ()), *data_shape[1:])])
            return True
        token = token_axis(data_shape)
        if token is None or len(index_shape) > 1:
            return False
        axis %= len(data_shape)
        if axis == token and token_axis(index_shape) is None:
            return False
        if data_shape[axis] == 1 and not index_shape:  # the only entry of an axis: nothing but the axis goes
            self.layout.set_form(self.output, self.layout.form(data, self.node), self.node)
            return True
        frame = frame_axes(data_shape, keep=[axis])
        form = self.layout.in_frame(data, len(data_shape), frame, self.node)
        if form is None:
            return False
        position = frame.index(axis)
        kept = [data_shape[i] for i in frame]
        self._emit([form, indices], [[*kept[:position], *index_shape, *kept[position + 1 :]]], axis=position)
        return True

    def _gathernd(self) -> bool:
        """`GatherND` with one index an entry is a `Gather` along the first axis."""
        data, indices = self.inputs
        data_shape, index_shape = (dims(value) if value is not None else None for value in (data, indices))
        if data is None or indices is None or data_shape is None or index_shape is None:
            return False
        token = token_axis(index_shape)
        if (
            index_shape[-1] != 1
            or token is None
            or self.node.attributes.get_int("batch_dims", 0)
            or token_axis(data_shape) not in (None, 0)
        ):
            return False
        if any(dim != 1 for axis, dim in enumerate(index_shape) if axis != token):
            return False
        rows = self.editor.reshape(self.node, self.layout.form(indices, self.node), [index_shape[token]])
        form = self.layout.form(data, self.node)
        shape = [*(dims(rows) or ()), *(dims(form) or ())[1:]]
        made = self.editor.node(self.node, "Gather", [form, rows], shape, attributes={"axis": 0}, dtype=data.dtype)
        self.layout.set_form(self.output, made, self.node)
        return True
