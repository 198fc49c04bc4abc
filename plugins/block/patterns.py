"""The forms in which the steps of a block stand in an OpenVINO model, as the ONNX front end leaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from plugins.linear.op import OP_TYPE as LINEAR
from plugins.linear.openvino_weights import constant_floats
from plugins.paged_attention.op import INPUTS
from plugins.paged_attention.op import OP_TYPE as ATTENTION

Key = tuple[str, int]


@dataclass(frozen=True)
class Match:
    """A value that one step makes.

    Attributes:
        kind: the step.
        output: the value.
        inputs: the rows that the step takes.
        absorbed: names of the nodes that do the step's work, the last one included.
        constants: a weight and a bias; or a gain; or sinks and ALiBi slopes, each empty where there are none.
        epsilon: of a norm.
        attributes: of a product.
        tables: of attention: past_lens, query_starts, block_ids, block_starts.
        caches: of attention: keys and values.
        numbers: of attention: settings and scalars, as `plugins.paged_attention.native` has them.
    """

    kind: str
    output: ov.Output
    inputs: tuple[ov.Output, ...]
    absorbed: frozenset[str]
    constants: tuple[ov.Output, ...] = ()
    epsilon: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)
    tables: tuple[ov.Output, ...] = ()
    caches: tuple[ov.Output, ...] = ()
    numbers: tuple[float, ...] = ()


def key_of(output: ov.Output) -> Key:
    """A value's name, unique in its model."""
    return output.get_node().get_name(), output.get_index()


def row_width(output: ov.Output) -> int | None:
    """Floats in a row of a value [rows, ...] f32 with any number of rows; None for anything else."""
    shape = output.get_partial_shape()
    if output.get_element_type() != ov.Type.f32 or shape.rank.is_dynamic or len(shape) < 2 or shape[0].is_static:
        return None
    width = 1
    for dimension in list(shape)[1:]:
        if dimension.is_dynamic:
            return None
        width *= dimension.get_length()
    return width


def views(node: ov.Node) -> list[int] | None:
    """Widths of the outputs of a node that only names columns of its input, one after the other; None for any other.

    Such are a VariadicSplit of rows [rows, width], and a Reshape of rows into heads, or back.
    """
    if node.get_type_name() not in ("Reshape", "VariadicSplit") or row_width(node.input_value(0)) is None:
        return None
    if node.get_type_name() == "Reshape":
        width = row_width(node.output(0))
        return None if width is None or width != row_width(node.input_value(0)) else [width]
    axis, lengths = (constant_floats(node.input_value(i).get_node()) for i in (1, 2))
    if axis is None or lengths is None or len(node.input_value(0).get_partial_shape()) != 2:
        return None
    if int(axis.reshape(-1)[0]) not in (1, -1) or lengths.min() < 0:
        return None
    return [int(length) for length in lengths]


def match(node: ov.Node) -> Match | None:
    """The step whose result is `node`'s, if any."""
    matcher = _MATCHERS.get(node.get_type_name())
    if matcher is None or node.get_output_size() != 1 or row_width(node.output(0)) is None:
        return None
    found = matcher(node)
    if found is None or any(row_width(value) is None for value in found.inputs):
        return None
    return found


def _nodes(*nodes: ov.Node) -> frozenset[str]:
    return frozenset(node.get_name() for node in nodes)


def _of_type(output: ov.Output, kind: str) -> ov.Node | None:
    node = output.get_node()
    return node if node.get_type_name() == kind else None


def _is_plain(output: ov.Output) -> bool:
    return len(output.get_partial_shape()) == 2


def _linear(node: ov.Node) -> Match | None:
    if not _is_plain(node.input_value(0)):
        return None
    constants = tuple(node.input_values()[1:])
    return Match("linear", node.output(0), (node.input_value(0),), _nodes(node), constants, 0.0, node.get_attributes())


def _attend(node: ov.Node) -> Match | None:
    given = dict(zip(INPUTS, node.input_values(), strict=False))
    rows = tuple(given[name] for name in ("query", "key", "value"))
    constants = tuple(_floats(given[name]) for name in ("sinks", "alibi_slopes"))
    numbers = [node.input_value(i).get_node() for i in range(len(INPUTS), node.get_input_size())]
    if None in constants or any(number.get_type_name() != "Constant" for number in numbers):
        return None
    return Match(
        "attend",
        node.output(0),
        rows,
        _nodes(node),
        tuple(constant for constant in constants if constant is not None),
        tables=tuple(given[name] for name in ("past_lens", "query_starts", "block_ids", "block_starts")),
        caches=(given["key_cache"], given["value_cache"]),
        numbers=tuple(number for constant in numbers for number in constant.get_data().tolist()),
    )


def _floats(output: ov.Output) -> ov.Output | None:
    values = constant_floats(output.get_node())
    return None if values is None else _constant(values)


def _constant(values: NDArray[np.float32]) -> ov.Output:
    return ops.constant(values.reshape(-1).astype(np.float32)).output(0)


def _add(node: ov.Node) -> Match | None:
    return _biased(node) or _sum(node) or _rope(node)


def _biased(node: ov.Node) -> Match | None:
    """A product that nothing else uses, and a constant of its channels."""
    for product_at in (0, 1):
        product = _of_type(node.input_value(product_at), LINEAR)
        bias = constant_floats(node.input_value(1 - product_at).get_node())
        if product is None or bias is None or bias.size != row_width(node.output(0)):
            continue
        plain = _linear(product)
        if plain is None or len(plain.constants) != 1 or len(product.output(0).get_target_inputs()) != 1:
            continue
        return replace(
            plain,
            output=node.output(0),
            absorbed=_nodes(node, product),
            constants=(*plain.constants, _constant(bias)),
        )
    return None


def _sum(node: ov.Node) -> Match | None:
    left, right = node.input_values()
    if not (_is_plain(left) and _is_plain(right) and row_width(left) == row_width(right) == row_width(node.output(0))):
        return None
    return Match("add", node.output(0), (left, right), _nodes(node))


def _multiply(node: ov.Node) -> Match | None:
    return _norm(node) or _gate(node)


def _norm(node: ov.Node) -> Match | None:
    """gain * (x * (mean(x^2) + epsilon)^-1/2), the root and its inverse apart or together; of rows or of heads."""
    size = list(node.get_output_partial_shape(0))[-1].get_length()
    for scaled_at in (0, 1):
        scaled = _of_type(node.input_value(scaled_at), "Multiply")
        gain = constant_floats(node.input_value(1 - scaled_at).get_node())
        if scaled is None or gain is None or gain.shape[-1:] != (size,) or gain.size != size:
            continue
        for x_at in (0, 1):
            x, factor = scaled.input_value(x_at), scaled.input_value(1 - x_at)
            found = _inverse_root(factor, x)
            if found is not None and x.get_partial_shape() == node.get_output_partial_shape(0):
                epsilon, inside = found
                absorbed = _nodes(node, scaled) | inside
                kind = "norm" if _is_plain(x) else "head_norm"
                return Match(kind, node.output(0), (x,), absorbed, (_constant(gain),), epsilon)
    return None


def _inverse_root(factor: ov.Output, x: ov.Output) -> tuple[float, frozenset[str]] | None:
    power = _of_type(factor, "Power")
    if power is None:
        return None
    exponent = _scalar(power.input_value(1))
    root = _of_type(power.input_value(0), "Sqrt")
    inside = power if root is None else root
    if exponent != (-0.5 if root is None else -1.0):
        return None
    total = _of_type(inside.input_value(0), "Add")
    mean = None if total is None else _of_type(total.input_value(0), "ReduceMean")
    square = None if mean is None else _of_type(mean.input_value(0), "Power")
    if total is None or mean is None or square is None:
        return None
    epsilon = _scalar(total.input_value(1))
    if epsilon is None or _scalar(square.input_value(1)) != 2.0 or square.input_value(0) != x:
        return None
    if list(mean.get_output_partial_shape(0)) != [*list(x.get_partial_shape())[:-1], ov.Dimension(1)]:
        return None
    return epsilon, _nodes(*(part for part in (power, root, total, mean, square) if part is not None))


def _gate(node: ov.Node) -> Match | None:
    """(gate * sigmoid(gate)) * up, or gelu(gate) * up."""
    for active_at in (0, 1):
        gelu, up = _of_type(node.input_value(active_at), "Gelu"), node.input_value(1 - active_at)
        if gelu is not None and gelu.get_attributes()["approximation_mode"] == "TANH":
            gate = gelu.input_value(0)
            if _is_plain(gate) and _is_plain(up) and row_width(gate) == row_width(up):
                return Match("gelu_gate", node.output(0), (gate, up), _nodes(node, gelu))
        active, up = _of_type(node.input_value(active_at), "Multiply"), node.input_value(1 - active_at)
        if active is None:
            continue
        for gate_at in (0, 1):
            gate, sigmoid = active.input_value(gate_at), _of_type(active.input_value(1 - gate_at), "Sigmoid")
            if sigmoid is None or sigmoid.input_value(0) != gate or not (_is_plain(gate) and _is_plain(up)):
                continue
            if row_width(gate) == row_width(up):
                return Match("gate", node.output(0), (gate, up), _nodes(node, active, sigmoid))
    return None


def _rope(node: ov.Node) -> Match | None:
    """x * cos + concat(-x's second half, x's first half) * sin, of x [rows, heads, 1, size]."""
    products = [_of_type(value, "Multiply") for value in node.input_values()]
    if products[0] is None or products[1] is None:
        return None
    for plain, turned in (products, products[::-1]):
        assert plain is not None
        assert turned is not None
        whole, halves = plain.input_value(0), _of_type(turned.input_value(0), "Concat")
        shape = whole.get_partial_shape()
        if halves is None or len(halves.input_values()) != 2 or shape != node.get_output_partial_shape(0):
            continue
        if len(shape) != 4 or shape[3].is_dynamic:
            continue
        size = shape[3].get_length()
        negative = _of_type(halves.input_value(0), "Negative")
        second = None if negative is None else _of_type(negative.input_value(0), "Slice")
        first = _of_type(halves.input_value(1), "Slice")
        if negative is None or second is None or first is None:
            continue
        if not (_is_slice(second, whole, size // 2, size) and _is_slice(first, whole, 0, size // 2)):
            continue
        cos, sin = plain.input_value(1), turned.input_value(1)
        if row_width(cos) != size or row_width(sin) != size:
            continue
        inside = _nodes(node, plain, turned, halves, negative, second, first)
        return Match("rope", node.output(0), (whole, cos, sin), inside)
    return None


def _is_slice(node: ov.Node, of: ov.Output, start: int, stop: int) -> bool:
    ends = [_scalar(node.input_value(i)) for i in range(1, node.get_input_size())]
    return node.input_value(0) == of and ends[:3] == [start, stop, 1] and (len(ends) < 4 or ends[3] in (-1, 3))


def _scalar(output: ov.Output) -> float | None:
    values = constant_floats(output.get_node())
    return float(values.reshape(-1)[0]) if values is not None and values.size == 1 else None


_MATCHERS: dict[str, Callable[[ov.Node], Match | None]] = {
    LINEAR: _linear,
    ATTENTION: _attend,
    "Add": _add,
    "Multiply": _multiply,
}
