"""The C++ kernels called directly, without OpenVINO: for tests and measurements."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.native import build_native
from plugins.paged_attention.kv_formats import DTYPES, KvFormat
from plugins.paged_attention.memory import zeroed
from plugins.paged_attention.native import formats

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
_ARRAYS = (
    "query", "key", "value", "out", "key_cache", "value_cache", "past_lens", "query_starts", "block_ids",
    "block_starts", "sinks", "alibi_slopes",
)  # fmt: skip
_INTEGERS = ("sequences", "num_heads", "num_kv_heads", "head_size", "v_head_size", "sliding_window")
_FLOATS = ("scale", "softcap", "key_scale", "value_scale")


class MissingIsaError(Exception):
    """An instruction set that this machine does not have."""


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("key_format", ctypes.c_int32 * 3),
        ("value_format", ctypes.c_int32 * 3),
        *((name, ctypes.c_float) for name in _FLOATS),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    import openvino  # noqa: F401  the library refers to OpenVINO's, which this loads

    return ctypes.CDLL(str(build_native()))


class Step:
    """One step of `plancast::PagedAttention` by the C++ kernels, bound to its arrays once and run as often as wanted.

    Args:
        inputs: under the operator's names, f32 and i32; the caches u8 pages in the kernels' order (`cpu_layout.py`),
            written in place.
        attributes: the ONNX attributes of the node.
        isa: one of `ISAS`; None: the best one here.

    Attributes:
        out: f32 [T, num_heads * v_head_size].

    Raises:
        ValueError: an array of another type.
    """

    def __init__(self, inputs: Mapping[str, NDArray], attributes: Mapping[str, Any], *, isa: str | None = None):
        self._isa = isa
        self._problem = problem = _Problem()
        self._held = held = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in held.items():
            wanted = np.uint8 if name.endswith("_cache") else np.int32 if name in _ARRAYS[6:10] else np.float32
            if name in _ARRAYS and array.dtype != wanted:
                raise ValueError(f"{name} is {array.dtype}, not {np.dtype(wanted)}")
            if name.endswith("_cache") and not np.shares_memory(array, inputs[name]):
                raise ValueError(f"{name} is not contiguous")
        self.out = np.zeros((len(held["query"]), attributes["num_heads"] * attributes["v_head_size"]), np.float32)
        held["out"] = self.out
        for name in _ARRAYS:
            setattr(problem, name, held[name].ctypes.data if name in held else None)
        for name in _INTEGERS[1:]:
            setattr(problem, name, attributes.get(name, 0))
        problem.sequences = len(held["past_lens"])
        for name in _FLOATS:
            setattr(problem, name, attributes.get(name, 0.0))
        rotate = attributes.get("rotate", "none")
        for part, form in zip(("key", "value"), formats(attributes), strict=True):
            numbers = (DTYPES.index(form.dtype), form.group_size, rotate in (part, "both"))
            setattr(problem, f"{part}_format", (ctypes.c_int32 * 3)(*numbers))
        self._index = -1 if isa is None else ISAS.index(isa)

    def run(self, threads: int = 1) -> NDArray[np.float32]:
        """Write the new keys and values, attend, and return `out`.

        Raises:
            MissingIsaError: an instruction set that this machine does not have.
        """
        if _library().plancast_attention(ctypes.byref(self._problem), self._index, threads):
            raise MissingIsaError(f"this machine does not have {self._isa}")
        return self.out


def attention(
    inputs: Mapping[str, NDArray], attributes: Mapping[str, Any], *, isa: str | None = None, threads: int = 1
) -> NDArray[np.float32]:
    """One `Step`, run once."""
    return Step(inputs, attributes, isa=isa).run(threads)


def empty_cache(form: KvFormat, num_blocks: int, num_heads: int, block_size: int, head_size: int) -> NDArray[np.uint8]:
    """Pages on cache lines, as an executor allocates them: u8 [num_blocks, num_heads, page bytes]."""
    shape = (num_blocks, num_heads, block_size * form.cell_bytes(head_size))
    return zeroed(int(np.prod(shape))).reshape(shape)
