"""RotaryEmbedding, written out in the one form that OpenVINO fuses and can also load from a compiled blob.

The front end reads RotaryEmbedding with tables of half a head. The CPU plugin's own operation computes that right, but
a blob loses the tables' length, and every position past the first comes out wrong (measured on 2026.4.1). Tables as
long as the head are the default that a blob comes back with.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from builder.passes.graph import Editor, dims, replace

_OPERATOR = "RotaryEmbedding"


def write_out_rope(model: ir.Model) -> int:
    """Replace each RotaryEmbedding of halves by `x * cos + rotate_half(x) * sin`, in place. Returns how many.

    Takes the nodes that the pass `fuse_rope` makes: x `[T, H, 1, D]`, cos and sin `[T, 1, D/2]`. Interleaved ones stay.
    """
    editor = Editor(model)
    full: dict[ir.Value, ir.Value] = {}
    written = 0
    for node in [node for node in model.graph if node.op_type == _OPERATOR and not node.domain]:
        interleaved = node.attributes.get("interleaved")
        if interleaved is not None and interleaved.as_int():
            continue
        x, cos, sin = node.inputs[:3]
        assert x is not None
        assert cos is not None
        assert sin is not None
        replace(
            node.outputs[0],
            _rotation(editor, node, x, _table(editor, node, cos, full), _table(editor, node, sin, full)),
        )
        written += 1
    common.RemoveUnusedNodesPass()(model)
    return written


def _table(editor: Editor, at: ir.Node, half: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """`[T, 1, D/2]` -> `[T, 1, 1, D]`, once a table."""
    if half not in made:
        width = 2 * _width(half)
        twice = editor.node(at, "Concat", [half, half], ("T", 1, width), attributes={"axis": -1})
        made[half] = editor.reshape(at, twice, ("T", 1, 1, width))
    return made[half]


def _rotation(editor: Editor, at: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    shape, width = dims(x), _width(x)
    assert shape is not None
    half = (*shape[:-1], width // 2)

    def part(start: int, stop: int) -> ir.Value:
        ends = [editor.constant([number]) for number in (start, stop, -1, 1)]
        return editor.node(at, "Slice", [x, *ends], half)

    negated = editor.node(at, "Neg", [part(width // 2, width)], half)
    turned = editor.node(at, "Concat", [negated, part(0, width // 2)], shape, attributes={"axis": -1})
    plain = editor.node(at, "Mul", [x, cos], shape)
    return editor.node(at, "Add", [plain, editor.node(at, "Mul", [turned, sin], shape)], shape)


def _width(value: ir.Value) -> int:
    shape = dims(value)
    assert shape is not None
    return int(shape[-1])
