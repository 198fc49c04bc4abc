"""Written-out rotary embeddings become `RotaryEmbedding` (opset 23): halves or interleaved pairs.

The node takes `[T, H, 1, D]`, tokens in the place of its batch and one step a token, so that nothing is transposed,
with cos and sin `[T, 1, D/2]`. Where a part of each head is rotated, the node works on that part. Two ways of writing
it are known:

    x * cos + rotate_half(x) * sin                          cos, sin as long as x, each frequency twice
    concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)        cos, sin half as long (gpt_oss)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.base import GraphPass
from builder.passes.conditions import flat_attention, tokens_first, well_formed
from builder.passes.graph import Editor, constant, dims, made_by, replace, scalar

if TYPE_CHECKING:
    from builder.recipe import Recipe

_END = 1 << 30  # a slice that ends here or later goes to the end


class _Rotation(NamedTuple):
    """What is rotated, and by which half-length tables `[T, D/2]`."""

    data: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool


class _Part(NamedTuple):
    """A slice of the last axis of `data`: `start`, `start + step`, ... below `stop`."""

    data: ir.Value
    start: int
    stop: int
    step: int


class FuseRope(GraphPass):
    """One `RotaryEmbedding` node for each query and key."""

    name = "fuse_rope"
    requires = (well_formed, flat_attention, tokens_first)
    ensures = (well_formed, flat_attention, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        editor = Editor(model)
        tables = _Tables(editor)
        fused = 0
        for node in list(model.graph):
            rotation = _match_sum(node, tables) or _match_halves(node)
            if rotation is None:
                continue
            made = _emit(editor, node, rotation)
            if made is None:
                continue
            fused += 1
            replace(node.outputs[0], made)
        common.RemoveUnusedNodesPass()(model)
        return fused


def _emit(editor: Editor, at: ir.Node, rotation: _Rotation) -> ir.Value | None:
    shape = dims(rotation.data)
    table_shape = dims(rotation.cos)
    if shape is None or table_shape is None or shape != dims(at.outputs[0]) or shape[0] != "T":
        return None
    half = int(shape[-1]) // 2
    heads = int(shape[1]) if len(shape) == 3 else 1
    if table_shape[-1] != half or dims(rotation.sin) != table_shape or len(shape) not in (2, 3):
        return None
    data = editor.reshape(at, rotation.data, ("T", heads, 1, shape[-1]))
    cos, sin = (editor.reshape(at, table, ("T", 1, half)) for table in (rotation.cos, rotation.sin))
    attributes = {"interleaved": int(rotation.interleaved)}
    rotated = editor.node(at, "RotaryEmbedding", [data, cos, sin], ("T", heads, 1, shape[-1]), attributes=attributes)
    return editor.reshape(at, rotated, shape)


def _match_sum(node: ir.Node, tables: _Tables) -> _Rotation | None:
    """`x * cos + rotate(x) * sin`."""
    if node.op_type != "Add" or node.domain:
        return None
    products = [made_by(value, "Mul") for value in node.inputs]
    for straight, turned in (products, products[::-1]):
        if straight is None or turned is None:
            continue
        for rotated, sin in (turned.inputs, turned.inputs[::-1]):
            found = _rotated(rotated)
            if found is None or sin is None:
                continue
            data, interleaved = found
            if data not in straight.inputs:
                continue
            cos = straight.inputs[1] if straight.inputs[0] is data else straight.inputs[0]
            assert cos is not None
            halves = [tables.half(table, interleaved, node) for table in (cos, sin)]
            if halves[0] is not None and halves[1] is not None:
                return _Rotation(data, halves[0], halves[1], interleaved)
    return None


def _rotated(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """`x`, and whether pairs are interleaved, where `value` is `concat(-x2, x1)` of its halves or of its pairs."""
    joined = _through_reshapes(value)
    concat = made_by(joined, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None
    negated = made_by(_through_reshapes(concat.inputs[0]), "Neg")
    if negated is None:
        return None
    second, first = _part(negated.inputs[0]), _part(_through_reshapes(concat.inputs[1]))
    if first is None or second is None or first.data is not second.data or first.data is None:
        return None
    width = (dims(first.data) or (0,))[-1]
    if not isinstance(width, int) or dims(value) != dims(first.data):  # type: ignore[arg-type]
        return None
    half = width // 2
    if (first[1:], second[1:]) == ((0, half, 1), (half, width, 1)) and joined is value:
        return first.data, False
    shape = dims(concat.outputs[0]) or ()
    pairs = shape[-2:] == (half, 2)
    if (first[1:], second[1:]) == ((0, width, 2), (1, width, 2)) and pairs:
        return first.data, True
    return None


def _match_halves(node: ir.Node) -> _Rotation | None:
    """`concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`."""
    if node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    less, more = made_by(node.inputs[0], "Sub"), made_by(node.inputs[1], "Add")
    if less is None or more is None:
        return None
    for a, b in (more.inputs, more.inputs[::-1]):
        terms = [_product(value) for value in (*less.inputs, a, b)]
        if any(term is None for term in terms):
            continue
        (x1, cos), (x2, sin), (x2_again, cos_again), (x1_again, sin_again) = terms  # type: ignore[misc]
        if (x1, cos, x2, sin) != (x1_again, cos_again, x2_again, sin_again):
            continue
        first, second = _part(x1), _part(x2)
        if first is None or second is None or first.data is not second.data:
            continue
        width = (dims(first.data) or (0,))[-1]
        if (first[1:], second[1:]) == ((0, int(width) // 2, 1), (int(width) // 2, width, 1)):
            return _Rotation(first.data, cos, sin, False)
    return None


def _product(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(part of x, table) of their product."""
    node = made_by(value, "Mul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return None
    a, b = node.inputs[0], node.inputs[1]
    return (a, b) if _part(a) is not None else (b, a)


def _part(value: ir.Value | None) -> _Part | None:
    """The slice of the last axis that `value` is."""
    node = value.producer() if value is not None else None
    if node is None or node.inputs[0] is None:
        return None
    data = node.inputs[0]
    shape = dims(data)
    if shape is None or not isinstance(shape[-1], int):
        return None
    rank, width = len(shape), shape[-1]
    if node.op_type == "Slice":
        numbers = [scalar(v) for v in node.inputs[1:]]
        if len(numbers) == 3:
            numbers.append(1)
        if len(numbers) != 4 or any(number is None for number in numbers):
            return None
        start, stop, axis, step = (int(number) for number in numbers if number is not None)
        start, stop = (v + width if -width <= v < 0 else v for v in (start, stop))
        return (
            _Part(data, start, width if stop >= _END else min(stop, width), step) if axis % rank == rank - 1 else None
        )
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) % rank == rank - 1:
        sizes = [int((dims(output) or (0,))[-1]) for output in node.outputs]
        index = node.outputs.index(value)  # type: ignore[arg-type]
        return _Part(data, sum(sizes[:index]), sum(sizes[: index + 1]), 1)
    return None


def _through_reshapes(value: ir.Value | None) -> ir.Value | None:
    """What `value` was before reshapes, its own producer aside."""
    while (node := made_by(value, "Reshape") or made_by(value, "Unsqueeze")) is not None:
        value = node.inputs[0]
    return value


class _Tables:
    """Halves of cos and sin tables that hold each frequency twice, made once for each table."""

    def __init__(self, editor: Editor):
        self.editor = editor
        self._made: dict[tuple[ir.Value, bool], ir.Value | None] = {}

    def half(self, table: ir.Value, interleaved: bool, at: ir.Node) -> ir.Value | None:
        """The first of the two copies in `table [T, 1, D]`, as `[T, D/2]`; None if they are not seen to be equal."""
        base = _through_reshapes(table)
        if base is None or (dims(base) or (0,))[-1] != (dims(table) or (0,))[-1]:
            base = table
        key = (base, interleaved)
        if key not in self._made:
            self._made[key] = self._halve(base, interleaved)
        return self._made[key]

    def _halve(self, value: ir.Value, interleaved: bool) -> ir.Value | None:
        node, shape = value.producer(), dims(value)
        if node is None or shape is None or not isinstance(shape[-1], int):
            return None
        half_shape = (*shape[:-1], shape[-1] // 2)
        if node.op_type == "Concat" and not interleaved:
            same = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return node.inputs[0] if same and node.attributes["axis"].as_int() in (-1, len(shape) - 1) else None
        if node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
            inner = node.inputs[0]
            assert inner is not None
            if interleaved and (repeated := self._repeated(inner, half_shape)) is not None:
                return repeated
            if (dims(inner) or (0,))[-1] != shape[-1]:
                return None
            half = self._halve(inner, interleaved)
            return self.editor.reshape(node, half, half_shape) if half is not None else None
        if node.op_type in ("Cos", "Sin", "Cast", "Neg", "Mul", "Div") and not node.domain:
            data = node.inputs[0]
            rest = node.inputs[1:]
            if data is None or any(v is None or constant(v) is None or constant(v).size != 1 for v in rest):  # type: ignore[union-attr]
                return None
            half = self._halve(data, interleaved)
            if half is None:
                return None
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            return self.editor.node(
                node, node.op_type, [half, *rest], half_shape, attributes=attributes, dtype=value.dtype
            )
        return None

    def _repeated(self, value: ir.Value, half_shape: tuple[int | str, ...]) -> ir.Value | None:
        """`f [.., D/2]` where `value` is `f` with each entry written twice along a new last axis."""
        expand = made_by(value, "Expand")
        concat = made_by(value, "Concat")
        if expand is not None and expand.inputs[0] is not None:
            inner = expand.inputs[0]
        elif concat is not None and len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]:
            inner = concat.inputs[0]
        else:
            return None
        node = expand or concat
        assert node is not None
        assert inner is not None
        if (dims(value) or ())[-1:] != (2,) or (dims(inner) or ())[-1:] != (1,):
            return None
        base = inner
        while (reshape := made_by(base, "Reshape") or made_by(base, "Unsqueeze")) is not None:
            assert reshape.inputs[0] is not None
            base = reshape.inputs[0]
        return self.editor.reshape(node, base, half_shape)
