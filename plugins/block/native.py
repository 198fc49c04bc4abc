"""A small model run by the C++ library alone (`graph.hpp`): blocks, and what stands between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MESSAGE = 512  # bytes of what is wrong with a program


@cache
def _library(path: Path) -> ctypes.CDLL:
    # The library finds OpenVINO's only where they are loaded: whether it loads must not hang on who came before.
    import openvino  # noqa: F401

    library = ctypes.CDLL(str(path))
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
    for name, takes, gives in (
        ("new", [pointer, number], pointer),
        ("free", [pointer], None),
        ("look_up_f32", [pointer, pointer, number, number], number),
        ("look_up_i8", [pointer, pointer, pointer, number, number], number),
        ("take", [pointer, number, number], number),
        ("norm", [pointer, number, pointer, ctypes.c_float], number),
        ("join", [pointer, pointer, number], number),
        ("block", [pointer, text, pointer, number, pointer, text, number], number),
        ("give", [pointer, number], None),
        ("run", [pointer, pointer, pointer, pointer, number], None),
    ):
        function = getattr(library, f"plancast_graph_{name}")
        function.argtypes, function.restype = takes, gives
    return library


class NativeGraph:
    """A graph in the library at `path`. Values are numbers: the inputs, then what each step makes, [rows, width] f32.

    Args:
        widths: of the inputs, in floats a row; 0 for one that is no rows (ids i64, tables i32, a cache u8).
    """

    def __init__(self, path: Path, widths: Sequence[int]):
        self._library = _library(path)
        self._graph = self._library.plancast_graph_new(_numbers(widths), len(widths))
        self._constants: list[NDArray[Any]] = []  # what the graph points to
        self._data = (ctypes.c_void_p * len(widths))()
        self._lengths = (ctypes.c_uint64 * len(widths))()
        self._outputs = (ctypes.c_void_p * 0)()

    def look_up(self, table: NDArray[Any], ids: int, scales: NDArray[np.float32] | None = None) -> int:
        """Rows of a table f32 [N, width], or i8 with `scales` f32 [N]; `ids`: an input."""
        width = table.shape[1]
        if scales is None:
            return self._library.plancast_graph_look_up_f32(self._graph, self._keep(table), width, ids)
        return self._library.plancast_graph_look_up_i8(self._graph, self._keep(table), self._keep(scales), width, ids)

    def take(self, value: int, ids: int) -> int:
        """Rows of a value; `ids`: an input."""
        return self._library.plancast_graph_take(self._graph, value, ids)

    def norm(self, value: int, gain: NDArray[np.float32], epsilon: float) -> int:
        """x / sqrt(mean(x^2) + epsilon) * gain."""
        return self._library.plancast_graph_norm(self._graph, value, self._keep(gain), epsilon)

    def join(self, parts: Sequence[int]) -> int:
        """Values side by side."""
        return self._library.plancast_graph_join(self._graph, _numbers(parts), len(parts))

    def block(self, program: str, inputs: Sequence[int], constants: NDArray[np.uint8] | None) -> int:
        """The first of the values that a block puts out. `inputs`: the operation's (`plugins.block.op`), but for its
        constants. Raises `ValueError`: `program` is none."""
        message = ctypes.create_string_buffer(_MESSAGE)
        kept = None if constants is None else self._keep(constants)
        made = self._library.plancast_graph_block(
            self._graph, program.encode(), _numbers(inputs), len(inputs), kept, message, _MESSAGE
        )
        if not made:
            raise ValueError(message.value.decode(errors="replace"))
        return made

    def give(self, value: int) -> None:
        """Write `value` to the next of the outputs."""
        self._library.plancast_graph_give(self._graph, value)
        self._outputs = (ctypes.c_void_p * (len(self._outputs) + 1))()

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

    def _keep(self, array: NDArray[Any]) -> int:
        if not array.flags.c_contiguous:
            raise ValueError("constants must be contiguous")
        self._constants.append(array)
        return array.ctypes.data

    def __del__(self) -> None:
        if (graph := getattr(self, "_graph", None)) is not None:
            self._library.plancast_graph_free(graph)


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)
