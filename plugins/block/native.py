"""A model run by the C++ library alone (`graph.hpp`), as its plan says."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.block.plan import Angles, Block, Constant, Join, LookUp, Norm, PlanError, Planned, Scale, Step, Take

_MESSAGE = 512  # bytes of what is wrong with a program
_TABLES = ("f32", "bf16", "i8")  # in the order of `Table::Type`


@cache
def _library(path: Path) -> ctypes.CDLL:
    # The library finds OpenVINO's only where they are loaded: whether it loads must not hang on who came before.
    import openvino  # noqa: F401

    library = ctypes.CDLL(str(path))
    pointer, number, real, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float, ctypes.c_char_p
    for name, takes, gives in (
        ("new", [pointer, number], pointer),
        ("free", [pointer], None),
        ("look_up", [pointer, number, pointer, number, pointer, number, number], number),
        ("angles", [pointer, number, number, pointer, number], number),
        ("take", [pointer, number, number], number),
        ("norm", [pointer, number, pointer, real], number),
        ("scale", [pointer, number, real], number),
        ("join", [pointer, pointer, number], number),
        ("block", [pointer, text, pointer, number, pointer, text, number], number),
        ("give", [pointer, number], None),
        ("run", [pointer, pointer, pointer, pointer, number], None),
    ):
        function = getattr(library, f"plancast_graph_{name}")
        function.argtypes, function.restype = takes, gives
    return library


class NativeGraph:
    """The graph of `planned` in the library at `path`.

    Attributes:
        plan: its inputs and outputs, by place.

    Raises:
        PlanError: a block's program is none that the library knows.
    """

    def __init__(self, path: Path, planned: Planned):
        self.plan, self._constants = planned
        self._library = _library(path)
        inputs = self.plan.inputs
        widths = _numbers([0 if each.is_cache else each.width for each in inputs])
        self._graph = self._library.plancast_graph_new(widths, len(inputs))
        for step in self.plan.steps:
            self._add(step)
        for output in self.plan.outputs:
            self._library.plancast_graph_give(self._graph, output.value)
        self._data = (ctypes.c_void_p * len(inputs))()
        self._lengths = (ctypes.c_uint64 * len(inputs))()
        self._outputs = (ctypes.c_void_p * len(self.plan.outputs))()

    def set_input(self, place: int, array: NDArray[Any], length: int) -> None:
        """Let the next runs read `length` rows of `array`, contiguous, which must stay."""
        self._data[place] = array.ctypes.data
        self._lengths[place] = length

    def set_length(self, place: int, length: int) -> None:
        """Let the next runs read `length` rows of the array that an input has."""
        self._lengths[place] = length

    def set_output(self, place: int, array: NDArray[np.float32]) -> None:
        """Let the next runs write to `array`, which must stay and have room for all rows."""
        self._outputs[place] = array.ctypes.data

    def run(self, num_threads: int) -> None:
        """Every input and output must have been set."""
        self._library.plancast_graph_run(self._graph, self._data, self._lengths, self._outputs, num_threads)

    def _add(self, step: Step) -> None:
        library, graph = self._library, self._graph
        match step:
            case LookUp(ids, table, scales):
                width = table.shape[1]
                group = width // scales.shape[1] if scales else 0
                kind = _TABLES.index(table.dtype)
                library.plancast_graph_look_up(graph, kind, self._at(table), width, self._at(scales), group, ids)
            case Angles(positions, frequencies, sine):
                (count,) = frequencies.shape
                library.plancast_graph_angles(graph, sine, positions, self._at(frequencies), count)
            case Take(value, ids):
                library.plancast_graph_take(graph, value, ids)
            case Norm(value, gain, epsilon):
                library.plancast_graph_norm(graph, value, self._at(gain), epsilon)
            case Scale(value, factor):
                library.plancast_graph_scale(graph, value, factor)
            case Join(values):
                library.plancast_graph_join(graph, _numbers(values), len(values))
            case Block(program, values, constants):
                message = ctypes.create_string_buffer(_MESSAGE)
                given = _numbers(values), len(values), self._at(constants)
                if not library.plancast_graph_block(graph, program.encode(), *given, message, _MESSAGE):
                    raise PlanError(message.value.decode(errors="replace"))

    def _at(self, constant: Constant | None) -> int | None:
        return None if constant is None else self._constants.ctypes.data + constant.begin

    def __del__(self) -> None:
        if (graph := getattr(self, "_graph", None)) is not None:
            self._library.plancast_graph_free(graph)


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)
