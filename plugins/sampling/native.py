"""The C++ passes over a row of logits, called through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plugins.native import find_native


class RowKernels:
    """`rows.hpp` of the shared library at `path`."""

    def __init__(self, path: Path):
        # The library finds OpenVINO's only where they are loaded: whether it loads must not hang on who came before.
        import openvino  # noqa: F401

        library = ctypes.CDLL(str(path))
        pointer, number, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.exp2 = library.plancast_exp2_chunks
        self.exp2.argtypes = [pointer, number, ctypes.c_float, pointer, number, pointer]
        self.exp2.restype = double
        self.nucleus = library.plancast_nucleus
        self.nucleus.argtypes = [pointer, number, number, pointer, double, double, pointer]
        self.nucleus.restype = number
        self.largest = library.plancast_largest
        self.largest.argtypes = [pointer, number, number, number, double, pointer, pointer, pointer]
        self.largest.restype = number
        self.likeliest = library.plancast_likeliest
        self.likeliest.argtypes = [pointer, number, pointer]
        self.likeliest.restype = number


class RowPasses:
    """The passes over rows f32 [V], with buffers of their own but for `values` f32 [V] and `sums` f32 [columns]."""

    def __init__(self, kernels: RowKernels, values: NDArray[np.float32], sums: NDArray[np.float32]):
        self._kernels = kernels
        self._scratch = np.empty(2 * sums.size, np.float32)
        self._ids = np.empty(values.size, np.int64)
        self._largest = np.empty(1, np.float32)
        self._keep = values, sums  # what the addresses point to
        self._size, self._columns = values.size, sums.size
        # Asking an array for its address takes as long as a kernel's call.
        self._to_values, self._to_sums = values.ctypes.data, sums.ctypes.data
        self._to_scratch, self._to_ids = self._scratch.ctypes.data, self._ids.ctypes.data
        self._to_largest = self._largest.ctypes.data

    def exp2(self, row: NDArray[np.float32], scale: float) -> float:
        """Set `values` to 2^(row * scale) and `sums` to the sums of chunks; returns their f64 total."""
        row = np.ascontiguousarray(row)
        return self._kernels.exp2(row.ctypes.data, self._size, scale, self._to_values, self._columns, self._to_sums)

    def nucleus(self, total: float, mass: float) -> NDArray[np.int64]:
        """Ids, ascending, of a superset, of few more, of the fewest largest `values` that reach `mass`."""
        count = self._kernels.nucleus(
            self._to_values, self._size, self._columns, self._to_sums, total, mass, self._to_ids
        )
        return self._ids[:count].copy()

    def largest(self, row: NDArray[np.float32], k: int, drop: float) -> tuple[NDArray[np.int64], float]:
        """Ids, ascending, of the values no less than a bound that `k` (<= columns) of them reach and that is not above
        the k-th largest, nor below the largest plus `drop`; and the largest: NaN, and no ids, where one is NaN."""
        row = np.ascontiguousarray(row)
        count = self._kernels.largest(
            row.ctypes.data, self._size, self._columns, k, drop, self._to_scratch, self._to_largest, self._to_ids
        )
        return self._ids[:count].copy(), float(self._largest[0])


@cache
def row_kernels() -> RowKernels | None:
    """The kernels of this machine's library; None where it is not built, or cannot be loaded."""
    path = find_native()
    if path is None:
        return None
    try:
        return RowKernels(path)
    except (ImportError, OSError, AttributeError):
        return None
