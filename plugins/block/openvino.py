"""`plancast::Block` on OpenVINO: layer upon layer becomes one operation, attention by our kernels included.

Runs after `plugins.linear.openvino.lower_linear`. Nodes that a block has a step for are gathered into groups such that
no path leaves a group and comes back; each group with more than one step, or of a product alone, is replaced.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from plugins.block.op import OP_TYPE, Columns, Program
from plugins.block.patterns import Key, Match, key_of, match, row_width, views

POOL = "kv_cache.all"  # the name of the input that holds every layer's caches
_LINE = 64  # bytes of a cache line
_SMALLEST = 2  # steps of a block: one alone gains nothing, and a product loses nothing


def fuse_blocks(model: ov.Model, native: Path) -> int:
    """Replace groups of products, norms, activations, sums, rotations and attention nodes of ours by blocks, in place.

    Args:
        model: in which products have become `Linear`.
        native: the library that brings the operation.

    Returns:
        How many blocks there are.
    """
    matches = _matches(model)
    factory = NodeFactory()
    factory.add_extension(str(native))
    made: dict[Key, ov.Output] = {}  # what a value has become
    groups = [group for group in _groups(model, matches) if len(group) >= _SMALLEST or group[0].kind == "linear"]
    pool = _join_caches(model, groups)
    for group in groups:
        _Builder(group, factory, made, pool).build()
    return len(groups)


class _Pool(NamedTuple):
    """All caches as one input u8 [num_blocks, bytes]: a block of every layer is one run of bytes."""

    caches: ov.Output
    begins: dict[Key, int]  # in a block, in bytes


def _join_caches(model: ov.Model, groups: list[list[Match]]) -> _Pool | None:
    """Make the caches of a model one input, `POOL`, where blocks alone use them: each input costs 3 us a step."""
    attention = {
        name: matched for group in groups for matched in group if matched.kind == "attend" for name in matched.absorbed
    }
    caches = {key_of(cache): cache for matched in attention.values() for cache in matched.caches}
    begins: dict[Key, int] = {}
    end = 0
    for key, cache in caches.items():
        users = {target.get_node().get_name() for target in cache.get_target_inputs()}
        if cache.get_node().get_type_name() != "Parameter" or not users <= attention.keys():
            return None
        begins[key] = end
        end += math.prod(dimension.get_length() for dimension in list(cache.get_partial_shape())[1:])
    if len(caches) < 2:
        return None
    pool = ov.op.Parameter(ov.Type.u8, ov.PartialShape([-1, end]))
    pool.set_friendly_name(POOL)
    pool.output(0).set_names({POOL})
    model.add_parameters([pool])
    for cache in caches.values():
        model.remove_parameter(cast(ov.op.Parameter, cache.get_node()))
    return _Pool(pool.output(0), begins)


def _matches(model: ov.Model) -> dict[Key, Match]:
    """Every value that a step of a block can make, in an order in which they can be made."""
    found: dict[Key, Match] = {}
    tables: list[Key] = []  # one set of them serves a block
    for node in model.get_ordered_ops():
        matched = match(node)
        if matched is None:
            continue
        tables = tables or [key_of(table) for table in matched.tables]
        if not matched.tables or [key_of(table) for table in matched.tables] == tables:
            for name in matched.absorbed:  # a product that has its bias now
                found.pop((name, 0), None)
            found[key_of(matched.output)] = matched
    return found


def _groups(model: ov.Model, matches: dict[Key, Match]) -> list[list[Match]]:
    """The matches that can run together.

    A match's level is the number of times that a path to it comes in from outside; matches of one level that feed one
    another make a group.
    """
    level: dict[Key, int] = {}
    owner: dict[Key, Key] = {}  # of a matched value or of a part of it, the matched value
    parent: dict[Key, Key] = {}

    def root(key: Key) -> Key:
        while parent[key] != key:
            key = parent[key]
        return key

    for node in model.get_ordered_ops():
        for output in node.outputs():
            key = key_of(output)
            matched = matches.get(key)
            whole = owner.get(key_of(node.input_value(0))) if matched is None and views(node) else None
            if matched is not None:
                sources = [key_of(value) for value in matched.inputs]
                level[key] = max(level.get(source, 0) + (source not in owner) for source in sources)
                owner[key] = parent[key] = key
                for source in sources:
                    if source in owner and level[owner[source]] == level[key]:
                        parent[root(owner[source])] = root(key)
            elif whole is not None:
                level[key], owner[key] = level[whole], whole
            else:
                level[key] = max((level[key_of(value)] for value in node.input_values()), default=0)
    groups: dict[Key, list[Match]] = {}
    for key, matched in matches.items():
        groups.setdefault(root(key), []).append(matched)
    return list(groups.values())


class _Builder:
    """Turns one group into one node."""

    def __init__(self, group: list[Match], factory: NodeFactory, made: dict[Key, ov.Output], pool: _Pool | None):
        self.factory, self.made, self.pool = factory, made, pool
        self.matches = {key_of(matched.output): matched for matched in group}
        self.absorbed = {name for matched in group for name in matched.absorbed}
        self.users: dict[Key, list[Match]] = {}
        self.left: list[ov.Output] = []  # what is used outside
        for matched in group:
            for value in matched.inputs:
                self.users.setdefault(self._view(value)[0], []).append(matched)
            if self._is_used_outside(matched.output):
                self.left.append(matched.output)
        self.whole_outside = {self._view(output)[0] for output in self.left}

    def build(self) -> None:
        rows: list[ov.Output] = []
        known: dict[Key, int] = {}
        for matched in self.matches.values():
            for value in matched.inputs:
                key = self._view(value)[0]
                if key not in self.matches and key not in known:
                    known[key] = len(rows)
                    rows.append(self.made.get(key, value))
        widths = [row_width(value) for value in rows]
        assert all(width is not None for width in widths)
        self.program = Program([width for width in widths if width is not None])
        self.known = known
        self.constants: list[ov.Output] = []
        attention = [matched for matched in self.matches.values() if matched.kind == "attend"]
        self.caches = {key_of(cache): cache for matched in attention for cache in matched.caches}
        tables = attention[0].tables if attention else ()
        self.first_port = len(rows) + len(tables) + len(self.caches)
        leading = [*rows, *tables, *self.caches.values()]
        if self.caches and self.pool is not None:
            leading = [*rows, *tables, self.pool.caches]
            block_bytes = self.pool.caches.get_partial_shape()[1].get_length()
            self.program.pool(block_bytes, [self.pool.begins[key] for key in self.caches])
        self.results = {key_of(output): index for index, output in enumerate(self.left)}
        for matched in self.matches.values():
            if not self._is_taken_in(matched):
                self._emit(matched)
        for output in self.left:
            key = key_of(output)
            if key not in self.matches:
                columns = self._columns(output)
                self.program.step("copy", self.program.value(columns.width, self.results[key]), columns)
        constants = self.constants
        if constants and all(constant.get_node().get_type_name() == "Constant" for constant in constants):
            constants = [self._one_constant()]
        node = self.factory.create(OP_TYPE, [*leading, *constants], {"program": self.program.text})
        node.set_friendly_name(f"block.{self.left[0].get_node().get_friendly_name()}")
        for index, output in enumerate(self.left):
            result = node.output(index)
            self.made[key_of(output)] = result
            shaped = _in_shape(result, output)
            shaped.set_names(output.get_names())
            for target in output.get_target_inputs():
                target.replace_source_output(shaped)

    def _one_constant(self) -> ov.Output:
        """All constants as one, u8, each on a cache line: OpenVINO takes 3 to 4 us a step for each input of a node."""
        arrays = [constant.get_node().get_data().reshape(-1).view(np.uint8) for constant in self.constants]
        begins = np.cumsum([0, *(-(-array.nbytes // _LINE) * _LINE for array in arrays)]).tolist()
        packed = np.zeros(begins[-1], np.uint8)
        for begin, array in zip(begins, arrays, strict=False):
            packed[begin : begin + array.nbytes] = array
        self.program.constants(begins[:-1])
        return ov.op.Constant(packed, shared_memory=False).output(0)

    def _emit(self, matched: Match) -> None:
        target, product, addend = matched, matched, None
        if matched.kind == "add":
            for value, other in (matched.inputs, matched.inputs[::-1]):
                maker = self.matches.get(key_of(value))
                if maker is not None and maker.kind == "linear" and self._is_taken_in(maker):
                    product, addend = maker, other
                    break
        key = key_of(target.output)
        width = row_width(target.output)
        assert width is not None
        if product.kind == "linear":
            operands = self._linear(product, addend)
        else:
            operands: list[Columns | int | float | str] = [self._columns(value) for value in product.inputs]
            if product.kind in ("norm", "head_norm"):
                operands += [self._port(product.constants[0]), product.epsilon]
            if product.kind == "head_norm":
                operands.append(product.constants[0].get_shape()[0])
            if product.kind == "attend":
                operands += self._attention(product)
        value = self.program.value(width, self.results.get(key))
        self.program.step(product.kind, value, *operands)
        self.known[key] = value

    def _linear(self, product: Match, addend: ov.Output | None) -> list[Columns | int | float | str]:
        source = self.matches.get(self._view(product.inputs[0])[0])
        nothing = Columns(0, 0, 0)
        kind, gain, epsilon, second = "plain", -1, 0.0, nothing
        values = product.inputs
        if source is not None and self._is_taken_in(source):
            kind, values = source.kind, source.inputs
            if kind == "norm":
                gain, epsilon = self._port(source.constants[0]), source.epsilon
            else:
                second = self._columns(values[1])
        weight = product.attributes
        return [
            kind,
            self._columns(values[0]),
            second,
            gain,
            epsilon,
            self._port(product.constants[0]),
            *(weight[name] for name in ("kind", "activations", "channels", "columns", "group")),
            int(weight["f16_scale"]),
            weight["low"],
            self._port(product.constants[1]) if len(product.constants) > 1 else -1,
            int(addend is not None),
            self._columns(addend) if addend is not None else nothing,
        ]

    def _attention(self, matched: Match) -> list[Columns | int | float | str]:
        """What an `attend` step takes but its rows."""
        options = [self._port(constant) if constant.get_shape()[0] else -1 for constant in matched.constants]
        caches = list(self.caches)
        return [*matched.numbers, *options, *(caches.index(key_of(cache)) for cache in matched.caches)]

    def _is_taken_in(self, matched: Match) -> bool:
        """Whether another step does this one's work: a norm or gate before products, a product before a sum."""
        key = key_of(matched.output)
        users = self.users.get(key, [])
        if key in self.whole_outside or not users:
            return False
        if matched.kind in ("norm", "gate", "gelu_gate"):
            return all(user.kind == "linear" and key_of(user.inputs[0]) == key for user in users)
        if matched.kind != "linear" or len(users) != 1 or users[0].kind != "add":
            return False
        # Of a sum of two products, the first is a value of its own.
        taken = [
            maker
            for maker in (self.matches.get(key_of(value)) for value in users[0].inputs)
            if maker is not None and maker.kind == "linear"
        ]
        return any(key_of(value) == key for value in users[0].inputs) and taken[-1] is matched

    def _view(self, value: ov.Output) -> tuple[Key, int, int]:
        """The value of this group that `value` is columns of, or itself: its key, first column and width."""
        key = key_of(value)
        node = value.get_node()
        parts = None if key in self.matches else views(node)
        if parts is not None:
            whole, first, _ = self._view(node.input_value(0))
            if whole in self.matches:
                return whole, first + sum(parts[: value.get_index()]), parts[value.get_index()]
        return key, 0, row_width(value) or 0

    def _columns(self, value: ov.Output) -> Columns:
        key, first, width = self._view(value)
        return Columns(self.known[key], first, width)

    def _port(self, constant: ov.Output) -> int:
        self.constants.append(constant)
        return self.first_port + len(self.constants) - 1

    def _is_used_outside(self, output: ov.Output) -> bool:
        """Whether others use a value in whole; parts of it that they use are noted in `left`."""
        outside = False
        for target in output.get_target_inputs():
            user = target.get_node()
            parts = views(user)
            if user.get_name() in self.absorbed:
                continue
            if parts is None:
                outside = True
            elif len(parts) == 1:  # what reshapes it can do so outside
                outside = self._is_used_outside(user.output(0)) or outside
            else:
                self.left += [part for part in user.outputs() if self._is_used_outside(part)]
        return outside


def _in_shape(rows: ov.Output, like: ov.Output) -> ov.Output:
    """Rows [rows, width] in the shape [rows, ...] of the value that they stand for."""
    shape = [-1, *(dimension.get_length() for dimension in list(like.get_partial_shape())[1:])]
    return rows if len(shape) == 2 else ops.reshape(rows, ops.constant(np.array(shape)), False).output(0)
