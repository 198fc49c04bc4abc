"""Finds the weight of a product in an OpenVINO model: a constant, and whatever turns it into floats."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from plugins.linear.op import BLOCK, Weight, group_count

_FOUR_BITS = {ov.Type.i4: "i4", ov.Type.u4: "u4"}
_INTEGERS = {ov.Type.i8: "i8", ov.Type.u8: "u8", **_FOUR_BITS}
_SHAPES = ("Reshape", "Unsqueeze", "Squeeze")


class _Stored(NamedTuple):
    """`(values - zero) * scale`: scale and zero (None: 0) have as many axes as the values, and broadcast to them."""

    kind: str  # i8, u8, i4, u4: of the values, which are held in 8 bits
    values: NDArray
    scale: NDArray[np.float32] | None = None
    zero: NDArray | None = None


def product_weight(product: ov.Node) -> Weight | None:
    """The weight of a MatMul's second input, as the kernels take it; None where it is anything else."""
    attributes = product.get_attributes()
    if attributes["transpose_a"]:
        return None
    halves = _bf16(product.input_value(1).get_node())
    if halves is not None:
        return Weight("bf16", np.ascontiguousarray(halves if attributes["transpose_b"] else halves.T))
    stored = _stored(product.input_value(1).get_node())
    if stored is None or stored.scale is None or stored.values.ndim != 2:
        return None
    if not attributes["transpose_b"]:
        zero = None if stored.zero is None else stored.zero.T
        stored = _Stored(stored.kind, stored.values.T, stored.scale.T, zero)
    return _weight(stored)


def minima_term(product: ov.Node, weight: Weight) -> tuple[ov.Node, Weight] | None:
    """The sum of `product` and `MatMul(ReduceSum(Reshape(x, [.., G, g])), minima [G, N])`, if the product goes there.

    Returns:
        The node that adds them, and the weight with its minima. None where there is no such term.
    """
    targets = list(product.output(0).get_target_inputs())
    if len(targets) != 1 or targets[0].get_node().get_type_name() != "Add":
        return None
    total = targets[0].get_node()
    term = total.input_value(1 - targets[0].get_index()).get_node()
    if term.get_type_name() != "MatMul" or any(term.get_attributes()[f"transpose_{i}"] for i in "ab"):
        return None
    minima, sums = constant_floats(term.input_value(1).get_node()), term.input_value(0).get_node()
    if minima is None or minima.ndim != 2 or minima.shape[1] != weight.channels or sums.get_type_name() != "ReduceSum":
        return None
    blocks = sums.input_value(0).get_node()
    if blocks.get_type_name() != "Reshape" or blocks.input_value(0) != product.input_value(0):
        return None
    shape = list(blocks.get_output_partial_shape(0))
    groups, width = len(minima), weight.columns // len(minima)
    if len(shape) < 2 or shape[-1].is_dynamic or shape[-1].get_length() != width or width % BLOCK:
        return None
    # What the kernels add minima to are unsigned values.
    centre = weight.zero
    if centre is None or (centre != (-128 if weight.kind == "int8" else 0)).any() or weight.scale is None:
        return None
    each = group_count(weight.columns, weight.group)
    if groups % each:
        return None
    values = weight.values.view(np.uint8) ^ np.uint8(128) if weight.kind == "int8" else weight.values
    scale = np.repeat(weight.scale, groups // each, axis=1)
    return total, Weight(weight.kind, values, scale, np.ascontiguousarray(minima.T), None, width if groups > 1 else 0)


def _bf16(node: ov.Node) -> NDArray[np.uint16] | None:
    """The bits of a bf16 constant of two axes behind conversions and transposes."""
    turned = False
    while node.get_type_name() in ("Convert", "Transpose"):
        turned ^= node.get_type_name() == "Transpose"
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.bf16:
        return None
    if len(node.get_output_shape(0)) != 2:
        return None
    bits = np.asarray(node.data).view(np.uint16).reshape(tuple(node.get_output_shape(0)))
    return bits.T if turned else bits


def _stored(node: ov.Node) -> _Stored | None:
    kind = node.get_type_name()
    if kind == "Constant":
        return _constant(node)
    if kind in ("Multiply", "Subtract"):
        return _arithmetic(node, kind)
    if kind not in ("Convert", "Transpose", *_SHAPES):
        return None
    stored = _stored(node.input_value(0).get_node())
    if stored is None or kind == "Convert":
        return stored
    parts = [
        None if part is None or part.size == 1 else np.broadcast_to(part, stored.values.shape) for part in stored[2:]
    ]
    moved = [_moved(node, part) for part in (stored.values, *parts)]
    for i, part in enumerate(stored[2:], start=1):
        if part is not None and part.size == 1 and moved[0] is not None:
            moved[i] = part.reshape((1,) * moved[0].ndim)
    if moved[0] is None:
        return None
    return _Stored(stored.kind, moved[0], moved[1], moved[2])


def _moved(node: ov.Node, array: NDArray | None) -> NDArray | None:
    """What a reshape or a transpose makes of a constant."""
    if array is None or node.get_output_partial_shape(0).is_dynamic:
        return None
    if node.get_type_name() == "Transpose":
        order = node.input_value(1).get_node()
        return array.transpose(np.asarray(order.data)) if order.get_type_name() == "Constant" else None
    return array.reshape(tuple(node.get_output_shape(0)))


def _constant(node: ov.Node) -> _Stored | None:
    kind, shape = _INTEGERS.get(node.get_element_type()), tuple(node.get_output_shape(0))
    if kind is None:
        return None
    if node.get_element_type() not in _FOUR_BITS:
        return _Stored(kind, np.asarray(node.data).reshape(shape))
    packed = np.asarray(node.data).view(np.uint8).reshape(-1)
    values = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1)[: int(np.prod(shape))]
    values = values.reshape(shape)
    return _Stored(kind, values if kind == "u4" else ((values ^ np.uint8(8)).view(np.int8) - np.int8(8)))


def _arithmetic(node: ov.Node, kind: str) -> _Stored | None:
    left, right = (node.input_value(i).get_node() for i in range(2))
    stored, other = _stored(left), constant_floats(right)
    if kind == "Multiply" and stored is None:
        stored, other = _stored(right), constant_floats(left)
    if stored is None or other is None or stored.scale is not None:
        return None
    if other.ndim < stored.values.ndim:
        other = other.reshape((1,) * (stored.values.ndim - other.ndim) + other.shape)
    if np.broadcast_shapes(other.shape, stored.values.shape) != stored.values.shape:
        return None
    if kind == "Multiply":
        return stored._replace(scale=other)
    return stored._replace(zero=other) if stored.zero is None else None


def constant_floats(node: ov.Node) -> NDArray[np.float32] | None:
    """The values of a constant, f32, behind conversions, reshapes and transposes."""
    kind = node.get_type_name()
    if kind == "Constant":
        stored = _constant(node)
        if stored is not None:
            return stored.values.astype(np.float32)
        if node.get_element_type() not in (ov.Type.f32, ov.Type.f16, ov.Type.bf16, ov.Type.i32, ov.Type.i64):
            return None
        if node.get_element_type() == ov.Type.bf16:
            bits = np.asarray(node.data).view(np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(tuple(node.get_output_shape(0)))
        return np.asarray(node.data, np.float32).reshape(tuple(node.get_output_shape(0)))
    if kind not in ("Convert", "Transpose", *_SHAPES):
        return None
    array = constant_floats(node.input_value(0).get_node())
    return array if kind == "Convert" else _moved(node, array)


def _weight(stored: _Stored) -> Weight | None:
    """`stored` [N, K] in the kernels' formats; None where its groups are none of theirs."""
    shape = stored.values.shape
    zero = stored.zero
    if zero is None and stored.kind in ("u8", "u4"):
        zero = np.zeros((1, 1), np.float32)
    centre = {"i8": 0, "u8": 128, "i4": -8, "u4": 0}[stored.kind]  # becomes the kernels' 0
    kind, low, high = ("int8", -128, 127) if stored.kind in ("i8", "u8") else ("int4", 0, 15)
    parts = [part for part in (stored.scale, zero) if part is not None]
    group = _common_group(parts, shape)
    if group is None:
        return None
    scale, *rest = (_by_group(part, shape, group) for part in parts)
    if stored.kind == "u8":
        values = stored.values ^ np.uint8(128)
        values = values.view(np.int8)
    elif stored.kind == "i4":
        values = (stored.values + np.int8(8)).view(np.uint8)
    else:
        values = stored.values
    values = np.ascontiguousarray(values)
    zeros = None
    if rest:
        shifted = rest[0] - centre
        if (shifted != np.rint(shifted)).any() or shifted.min() < low or shifted.max() > high:
            return None
        if (shifted != (0 if kind == "int8" else 8)).any():
            zeros = shifted.astype(np.int8 if kind == "int8" else np.uint8)
    return Weight(kind, values, scale, None, zeros, group)


def _common_group(parts: list[NDArray[np.float32]], shape: tuple[int, ...]) -> int | None:
    """The most columns that share all of `parts`: 0 for a whole row, else a multiple of `BLOCK`; None for fewer."""
    if all(part.shape[1] == 1 for part in parts):
        return 0
    columns = shape[1]
    widths = [columns] + [width for width in (256, 128, 64, BLOCK) if columns % width == 0 and width < columns]
    for width in widths:
        if all(_is_grouped(part, shape, width) for part in parts):
            return 0 if width == columns else width
    return None


def _is_grouped(part: NDArray[np.float32], shape: tuple[int, ...], width: int) -> bool:
    if part.shape[1] == 1:
        return True
    blocks = np.broadcast_to(part, (part.shape[0], shape[1])).reshape(part.shape[0], -1, width)
    return bool((blocks == blocks[:, :, :1]).all())


def _by_group(part: NDArray[np.float32], shape: tuple[int, ...], group: int) -> NDArray[np.float32]:
    """[N, groups] of what broadcasts to [N, K]."""
    if part.shape[1] == 1:
        return np.ascontiguousarray(np.broadcast_to(part, (shape[0], group_count(shape[1], group))), np.float32)
    return np.ascontiguousarray(np.broadcast_to(part, shape)[:, :: group or shape[1]], np.float32)
