"""A small model taken out of OpenVINO: blocks, and the few operations between them that the library has steps for.

A pass of a draft head is over in 0.2 ms, and OpenVINO takes as long again for shapes, tables of tensors and dispatch,
all of which the target's pass has driven out of the caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from plugins.block.native import NativeGraph
from plugins.block.op import OP_TYPE as BLOCK
from plugins.block.patterns import Key, key_of, match, row_width, views
from plugins.linear.openvino_weights import constant_floats
from plugins.paged_attention.memory import zeroed

_POSITIONS = "position_ids"


class UnknownOperationError(Exception):
    """The model has an operation that only OpenVINO runs; which one."""


class HostModel:
    """`model`, after `plugins.block.openvino.fuse_blocks`, as a graph of the library `native`.

    What hangs on positions alone is computed ahead by `core`, for `num_positions` of them.

    Attributes:
        graph: the graph, whose outputs are the model's results in their order.
        inputs: which of the graph's inputs each of the model's is, by name.
        input_widths: of the graph's inputs, in floats a row; 0 of those that are no rows.
        widths: of the outputs, in floats a row.

    Raises `UnknownOperationError`.
    """

    def __init__(self, model: ov.Model, native: Path, core: ov.Core, num_positions: int):
        parameters = model.get_parameters()
        self._core, self._num_positions = core, num_positions
        self.inputs = {node.get_friendly_name(): place for place, node in enumerate(parameters)}
        self.input_widths = [row_width(node.output(0)) or 0 for node in parameters]
        self.graph = NativeGraph(native, self.input_widths)
        self._made: dict[Key, int] = {key_of(node.output(0)): place for place, node in enumerate(parameters)}
        self.widths: list[int] = []
        for result in model.get_results():
            value = result.input_value(0)
            width = row_width(value)
            if width is None:
                raise UnknownOperationError(f"the result {result.get_friendly_name()} is not rows of one width")
            self.graph.give(self._value(value))
            self.widths.append(width)

    def _value(self, value: ov.Output) -> int:
        """The graph's number of a value, whose steps are added where they are not there yet."""
        key = key_of(value)
        if key not in self._made:
            self._make(value)
        return self._made[key]

    def _make(self, value: ov.Output) -> None:
        node, key, graph = value.get_node(), key_of(value), self.graph
        kind, matched, leaves = node.get_type_name(), match(node), _parameters(value)
        if [leaf.get_friendly_name() for leaf in leaves] == [_POSITIONS] and row_width(value):
            self._made[key] = graph.look_up(self._by_position(value, leaves[0]), self.inputs[_POSITIONS])
        elif kind == BLOCK:
            first = self._block(node)
            self._made |= {key_of(output): first + index for index, output in enumerate(node.outputs())}
        elif matched is not None and matched.kind == "norm":
            gain = matched.constants[0].get_node().get_data().reshape(-1).copy()
            self._made[key] = graph.norm(self._value(matched.inputs[0]), gain, matched.epsilon)
        elif kind == "Concat" and node.get_attributes()["axis"] in (1, -1) and row_width(value):
            self._made[key] = graph.join([self._value(part) for part in node.input_values()])
        elif kind == "Gather" and _is_zero(node.input_value(2)):
            self._made[key] = self._rows(*node.input_values()[:2])
        elif views(node) == [row_width(value)]:
            self._made[key] = self._value(node.input_value(0))
        else:
            raise UnknownOperationError(f"{kind} {node.get_friendly_name()}")

    def _by_position(self, value: ov.Output, positions: ov.op.Parameter) -> NDArray[np.float32]:
        """`value` [num_positions, width] at each position."""
        make: Any = ov.Model  # its types do not hold together
        compiled = self._core.compile_model(make([value], [positions]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return compiled(np.arange(self._num_positions))[0].reshape(self._num_positions, -1).copy()

    def _block(self, node: ov.Node) -> int:
        given = node.input_values()
        constants = None
        if (last := given[-1].get_node()).get_type_name() == "Constant":
            given = given[:-1]
            data = last.get_data().reshape(-1).view(np.uint8)
            constants = zeroed(data.nbytes)  # on huge pages
            constants[:] = data
        if any(value.get_node().get_type_name() == "Constant" for value in given):
            raise UnknownOperationError(f"{BLOCK} {node.get_friendly_name()} with constants apart")
        return self.graph.block(node.get_attributes()["program"], [self._value(each) for each in given], constants)

    def _rows(self, source: ov.Output, ids: ov.Output) -> int:
        """Rows of a value, or of constants f32 or int8 with a scale a row."""
        chosen = self._value(ids)
        if _parameters(source):
            return self.graph.take(self._value(source), chosen)
        node = source.get_node()
        if node.get_type_name() == "Multiply":
            scales = constant_floats(node.input_value(1).get_node())
            stored = node.input_value(0).get_node()
            stored = stored.input_value(0).get_node() if stored.get_type_name() == "Convert" else stored
            bytes_of = stored.get_type_name() == "Constant" and stored.get_element_type() == ov.Type.i8
            if bytes_of and scales is not None and scales.size == source.get_shape()[0]:
                table = np.array(stored.get_data())  # the model's own goes with it
                return self.graph.look_up(table, chosen, np.ascontiguousarray(scales.reshape(-1)))
        floats = constant_floats(node)
        if floats is None or floats.ndim != 2:
            raise UnknownOperationError(f"Gather of {node.get_type_name()} {node.get_friendly_name()}")
        return self.graph.look_up(np.array(floats), chosen)


def _is_zero(value: ov.Output) -> bool:
    node = value.get_node()
    return node.get_type_name() == "Constant" and not node.get_data().any()


def _parameters(value: ov.Output) -> list[ov.op.Parameter]:
    """The model's inputs that a value hangs on."""
    found: list[ov.op.Parameter] = []
    seen: set[str] = set()
    left = [value.get_node()]
    while left:
        node = left.pop()
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        if node.get_type_name() == "Parameter":
            found.append(cast(ov.op.Parameter, node))
        left += [given.get_node() for given in node.input_values()]
    return found
