"""The tokens-first layout: which axes of a value are kept, in which order, and values brought into a common frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from builder.passes.graph import Dim, Editor, constant, dims

TOKEN_SYMBOLS = ("T", "R")  # tokens of the batch; rows that want logits


def token_axis(shape: Sequence[Dim] | None) -> int | None:
    """The axis that is as long as the batch; None if there is none, or several, or the shape is unknown."""
    axes = [i for i, dim in enumerate(shape or ()) if dim in TOKEN_SYMBOLS]
    return axes[0] if len(axes) == 1 else None


def frame_axes(shape: Sequence[Dim], keep: Iterable[int] = ()) -> list[int]:
    """The axes of a value in tokens-first order: the token axis, then those longer than 1, the last one, and `keep`."""
    token, last = token_axis(shape), len(shape) - 1
    kept = {axis % len(shape) for axis in keep}
    others = [i for i, dim in enumerate(shape) if i != token and (dim != 1 or i == last or i in kept)]
    return others if token is None else [token, *others]


def tokens_first_dims(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape that a value of `shape` has tokens first: `[1, H, T, D]` -> `[T, H, D]`."""
    return tuple(shape[axis] for axis in frame_axes(shape))


class Layout:
    """The tokens-first form of each value of a graph that has one, and back."""

    def __init__(self, editor: Editor):
        self.editor = editor
        self._forms: dict[ir.Value, ir.Value] = {}  # value -> its tokens-first form
        self._moved: set[ir.Value] = set()  # values that nothing makes any more in their own layout
        self._originals: dict[ir.Value, ir.Value] = {}  # value -> itself, made again from its tokens-first form

    def set_form(self, value: ir.Value, form: ir.Value, at: ir.Node) -> None:
        """Record `form` (reshaped before `at` if need be) as the tokens-first form of `value`."""
        shape = dims(value)
        assert shape is not None
        self._forms[value] = self.editor.reshape(at, form, tokens_first_dims(shape))
        self._moved.add(value)

    def form(self, value: ir.Value, at: ir.Node) -> ir.Value:
        """`value` tokens first. A value that nobody has brought there yet (a graph input) is, before `at`."""
        shape = dims(value)
        if value in self._forms or shape is None or token_axis(shape) is None:
            return self._forms.get(value, value)
        order = [token_axis(shape), *(i for i in range(len(shape)) if i != token_axis(shape))]
        moved = value
        if order != sorted(order):  # type: ignore[type-var]
            moved = self.editor.node(
                at, "Transpose", [value], [shape[axis] for axis in order], attributes={"perm": order}
            )
        self._forms[value] = self.editor.reshape(at, moved, tokens_first_dims(shape))
        return self._forms[value]

    def original(self, value: ir.Value, at: ir.Node) -> ir.Value:
        """`value` in its own layout, made from its tokens-first form, for an operator that has no rule."""
        if value not in self._moved:
            return value
        if value not in self._originals:
            shape, form = dims(value), self._forms[value]
            assert shape is not None
            token = token_axis(shape)
            assert token is not None
            order = [token, *(i for i in range(len(shape)) if i != token)]
            full = self.editor.reshape(at, form, [shape[axis] for axis in order])
            if order != sorted(order):
                perm = [order.index(axis) for axis in range(len(shape))]
                full = self.editor.node(at, "Transpose", [full], shape, attributes={"perm": perm})
            self._originals[value] = full
        return self._originals[value]

    def in_frame(self, value: ir.Value, rank: int, frame: Sequence[int], at: ir.Node) -> ir.Value | None:
        """`value`, aligned right to a result of `rank` axes, with just the axes of `frame`, in that order.

        A value without tokens may come with its leading 1s left out, as broadcasting allows. None if it cannot be said.
        """
        shape = dims(value)
        if shape is None:
            return None
        aligned = [1] * (rank - len(shape)) + list(shape)
        if any(dim != 1 for axis, dim in enumerate(aligned) if axis not in frame):
            return None
        target = [aligned[axis] for axis in frame]
        if token_axis(shape) is not None:
            return self.editor.reshape(at, self.form(value, at), target)
        if any(not isinstance(dim, int) for dim in shape):
            return None
        order = [axis for axis in frame if aligned[axis] != 1]
        if order != sorted(order):  # cannot happen: of the axes of a frame only the token axis changes place
            return None
        while target and target[0] == 1 and len(target) > len(shape):
            target = target[1:]
        array = constant(value)
        if array is not None and tuple(shape) != tuple(target):
            return self.editor.constant(array.reshape([int(dim) for dim in target]), value.name or "const")
        return self.editor.reshape(at, value, target)
