"""What rotary angles are computed from, which stays in f32 whatever an engine computes in.

A position times a frequency has no digits left in 16 bits: in bf16, positions above 256 are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def angle_nodes(model: ir.Model) -> set[ir.Node]:
    """The nodes that compute sines and cosines, and all that they come from."""
    found: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        used = any(use.node in found for value in node.outputs for use in value.uses())
        if node.op_type in ("Cos", "Sin") or used:
            found.add(node)
    return found


def used_only_by(value: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether `value` is used, and by `nodes` alone."""
    uses = [use.node in nodes for use in value.uses()]
    return bool(uses) and all(uses)


def cast_uses(value: ir.Value, dtype: ir.DataType, uses: Sequence[ir.Usage]) -> None:
    """Let `uses` of a node's float output get it in `dtype`."""
    import onnx_ir as ir

    if not uses or value.dtype is None or not value.dtype.is_floating_point():
        return
    node = ir.node("Cast", [value], attributes={"to": dtype})
    (result,) = node.outputs
    result.name, result.dtype, result.shape = f"{value.name}_{dtype.name.lower()}", dtype, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, result)
    producer = value.producer()
    assert producer is not None
    assert producer.graph is not None
    producer.graph.insert_after(producer, node)
