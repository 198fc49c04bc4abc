"""Takes a model out of OpenVINO: its blocks, and the few operations between them that the C++ library has steps for.

OpenVINO's runtime takes 0.2 to 0.3 ms a step for shapes, tables of tensors and dispatch: as long as a draft head's
whole pass, a tenth of a small model's.
"""

from __future__ import annotations

import numpy as np
import openvino as ov

from plugins.block.op import OP_TYPE as BLOCK
from plugins.block.openvino import POOL
from plugins.block.patterns import Key, key_of, match, row_width, views
from plugins.block.plan import Angles, Block, Input, Join, LookUp, Norm, Output, Plan, PlanMaker, Scale, Step, Take
from plugins.linear.openvino_weights import constant_floats

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")
_TABLES = {ov.Type.f32: "f32", ov.Type.bf16: "bf16", ov.Type.i8: "i8"}


class UnknownOperationError(Exception):
    """The model has an operation that only OpenVINO runs; which one."""


class ModelPlan:
    """`model`, after `plugins.block.openvino.fuse_blocks`, as a plan.

    Attributes:
        plan: its inputs and outputs are the model's, in their order.
        maker: the constants; they lie in `model`, which must stay until they are written or copied.

    Raises `UnknownOperationError`.
    """

    def __init__(self, model: ov.Model):
        self._model = model
        self.maker = PlanMaker()
        parameters = model.get_parameters()
        self._inputs = [_input(node) for node in parameters]
        self._made: dict[Key, int] = {key_of(node.output(0)): place for place, node in enumerate(parameters)}
        self._steps: list[Step] = []
        self._values = len(parameters)
        outputs = []
        for result in model.get_results():
            value = result.input_value(0)
            width = row_width(value)
            if width is None:
                raise UnknownOperationError(f"the result {result.get_friendly_name()} is not rows of one width")
            outputs.append(Output(self._value(value), width))
        self.plan: Plan = self.maker.plan(self._inputs, self._steps, outputs)

    def _value(self, value: ov.Output) -> int:
        """The plan's number of a value, whose steps are added where they are not there yet."""
        key = key_of(value)
        if key not in self._made:
            self._make(value)
        return self._made[key]

    def _make(self, value: ov.Output) -> None:
        node, key = value.get_node(), key_of(value)
        if node.get_type_name() == BLOCK:
            step = self._block(node)
            first = self._add(step, step.outputs)
            self._made |= {key_of(output): first + index for index, output in enumerate(node.outputs())}
        elif views(node) == [row_width(value)]:
            self._made[key] = self._value(node.input_value(0))
        else:
            step = self._norm(node) or self._look_up(value) or self._between(node) or self._angles(node)
            if step is None:
                raise UnknownOperationError(f"{node.get_type_name()} {node.get_friendly_name()}")
            self._made[key] = self._add(step, 1)

    def _add(self, step: Step, count: int) -> int:
        self._steps.append(step)
        self._values += count
        return self._values - count

    def _block(self, node: ov.Node) -> Block:
        given = node.input_values()
        constants = None
        if (last := given[-1].get_node()).get_type_name() == "Constant":
            given = given[:-1]
            constants = self.maker.constant(last.get_data().reshape(-1).view(np.uint8), "u8")
        if any(value.get_node().get_type_name() == "Constant" for value in given):
            raise UnknownOperationError(f"{BLOCK} {node.get_friendly_name()} with constants apart")
        values = tuple(self._value(each) for each in given)
        return Block(node.get_attributes()["program"], values, constants, node.get_output_size())

    def _norm(self, node: ov.Node) -> Norm | None:
        matched = match(node)
        if matched is None or matched.kind != "norm":
            return None
        gain = matched.constants[0].get_node().get_data().reshape(-1).copy()
        return Norm(self._value(matched.inputs[0]), self.maker.constant(gain, "f32"), matched.epsilon)

    def _between(self, node: ov.Node) -> Join | Take | Scale | None:
        """What is done to rows that are there."""
        kind, given = node.get_type_name(), node.input_values()
        if kind == "Concat" and row_width(node.output(0)) and _is_along_rows(node):
            return Join(tuple(self._value(part) for part in given))
        if kind == "Gather" and _is_zero(given[2]) and row_width(given[0]):
            return Take(self._value(given[0]), self._ids(given[1]))
        for value, other in (given, given[::-1]) if kind == "Multiply" else ():
            factor = constant_floats(other.get_node())
            if factor is not None and factor.size == 1 and row_width(value) == row_width(node.output(0)):
                return Scale(self._value(value), float(factor.reshape(-1)[0]))
        return None

    def _angles(self, node: ov.Node) -> Angles | None:
        """cos(positions * frequencies), or sin."""
        if node.get_type_name() not in ("Cos", "Sin"):
            return None
        product = node.input_value(0).get_node()
        if product.get_type_name() != "Multiply" or row_width(product.output(0)) is None:
            return None
        for positions, other in (product.input_values(), product.input_values()[::-1]):
            frequencies = constant_floats(other.get_node())
            if frequencies is None or frequencies.size != row_width(product.output(0)):
                continue
            source = _behind(positions, (*_VIEWS, "Convert"))
            if row_width(positions) == 1 and source.get_element_type() == ov.Type.i64:
                stored = self.maker.constant(frequencies.reshape(-1), "f32")
                return Angles(self._ids(source), stored, node.get_type_name() == "Sin")
        return None

    def _look_up(self, value: ov.Output) -> LookUp | None:
        """Rows of constants, and what turns them into floats: a scale a row or a group of columns, before or after."""
        plain = _behind(value, ("Convert",)).get_node()
        if plain.get_type_name() == "Gather" and _is_zero(plain.input_value(2)):
            table, ids = plain.input_values()[:2]
            product = table.get_node() if table.get_node().get_type_name() == "Multiply" else None
            stored = _stored(table if product is None else product.input_value(0))
            scales = None if product is None else constant_floats(product.input_value(1).get_node())
            return self._table(stored, scales, ids) if product is None or scales is not None else None
        product = _behind(value, _VIEWS).get_node()
        if product.get_type_name() != "Multiply":
            return None
        rows, factors = (_behind(each, (*_VIEWS, "Convert")).get_node() for each in product.input_values())
        if any(each.get_type_name() != "Gather" or not _is_zero(each.input_value(2)) for each in (rows, factors)):
            return None
        shape = list(product.input_value(1).get_partial_shape())
        scales = constant_floats(factors.input_value(0).get_node())
        # Groups lie side by side: [rows, groups, columns of each] times [rows, groups, 1].
        if scales is None or shape[-1] != ov.Dimension(1) or rows.input_value(1) != factors.input_value(1):
            return None
        return self._table(_stored(rows.input_value(0)), scales, rows.input_value(1))

    def _table(self, stored: ov.Node | None, scales: np.ndarray | None, ids: ov.Output) -> LookUp | None:
        if stored is None:
            return None
        rows, width = stored.get_output_shape(0)
        if scales is not None:
            if scales.size % rows or width % (scales.size // rows) or scales.shape[0] != rows:
                return None
            scales = scales.reshape(rows, -1)
        kind = _TABLES[stored.get_element_type()]
        data = stored.get_data() if kind != "bf16" else np.asarray(stored.data).view(np.uint16)
        table = self.maker.constant(data.reshape(rows, width), kind)
        return LookUp(self._ids(ids), table, None if scales is None else self.maker.constant(scales, "f32"))

    def _ids(self, value: ov.Output) -> int:
        """The input that a value of numbers is."""
        place = self._made.get(key_of(value))
        if place is None or place >= len(self._inputs):
            raise UnknownOperationError(f"{value.get_node().get_friendly_name()} makes ids")
        return place


def _input(node: ov.Node) -> Input:
    name, width = node.get_friendly_name(), row_width(node.output(0)) or 0
    if "_cache." not in name:
        return Input(name, width)
    if name != POOL:
        raise UnknownOperationError(f"the cache {name} is apart from the others")
    return Input(name, node.get_partial_shape()[1].get_length(), is_cache=True)


def _behind(value: ov.Output, kinds: tuple[str, ...]) -> ov.Output:
    """What `value` comes from through operations of `kinds`."""
    while value.get_node().get_type_name() in kinds:
        value = value.get_node().input_value(0)
    return value


def _stored(value: ov.Output) -> ov.Node | None:
    """The constant [rows, width] of a known type behind conversions."""
    node = _behind(value, ("Convert",)).get_node()
    known = node.get_type_name() == "Constant" and node.get_element_type() in _TABLES
    return node if known and len(node.get_output_shape(0)) == 2 else None


def _is_zero(value: ov.Output) -> bool:
    node = value.get_node()
    return node.get_type_name() == "Constant" and not node.get_data().any()


def _is_along_rows(node: ov.Node) -> bool:
    """Whether a Concat sets rows side by side: nothing lies between the tokens' axis and its own."""
    shape = list(node.input_value(0).get_partial_shape())
    axis = node.get_attributes()["axis"] % len(shape)
    return axis > 0 and all(dimension == ov.Dimension(1) for dimension in shape[1:axis])
