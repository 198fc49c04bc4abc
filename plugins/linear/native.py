"""The C++ kernels of `plancast::Linear`, called without a graph around them: for tests and measurements."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plugins.linear.op import Activations, Weight

ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "portable")  # the best first
_KINDS = {"int8": 0, "int4": 1, "bf16": 2}
_LOWS = {"none": 0, "minimum": 1, "zero": 2}
_ACTIVATIONS = {"int8": 0, "int16": 1, "bf16": 2, "bf16x2": 3}


class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("channels", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("activations", ctypes.c_int32),
        ("f16_scale", ctypes.c_int32),
        ("low", ctypes.c_int32),
    )


@cache
def library(path: Path) -> ctypes.CDLL:
    """The shared library of `plugins.native` at `path`."""
    import openvino  # noqa: F401  (brings the library that ours is linked with)

    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    loaded.plancast_linear.argtypes = [
        ctypes.POINTER(_Linear), pointer, number, pointer, pointer, pointer, number, ctypes.c_char_p,
    ]  # fmt: skip
    loaded.plancast_isa.restype = ctypes.c_char_p
    loaded.plancast_read.argtypes, loaded.plancast_read.restype = [pointer, number, number], number
    loaded.plancast_peak.argtypes, loaded.plancast_peak.restype = [ctypes.c_int32, number, number], number
    return loaded


class Product:
    """`y = x W^T` by the kernels, over a packed weight.

    Args:
        path: the shared library.
        weight: gives the format and the shape.
        packed: `plugins.linear.op.pack(weight)`.
        activations: how x is rounded.
    """

    def __init__(self, path: Path, weight: Weight, packed: NDArray[np.uint8], activations: Activations):
        self._library = library(path)
        self._packed = packed  # what the pointer points to
        self.channels, self.columns = weight.channels, weight.columns
        self._weight = _Linear(
            packed.ctypes.data,
            self.channels,
            self.columns,
            weight.group,
            _KINDS[weight.kind],
            _ACTIVATIONS[activations],
            weight.f16_scale,
            _LOWS[weight.low],
        )

    def __call__(
        self,
        x: NDArray[np.float32],
        *,
        bias: NDArray[np.float32] | None = None,
        residual: NDArray[np.float32] | None = None,
        threads: int = 1,
        isa: str | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """f32 [M, K] -> f32 [M, N], into `out` where given (all C-contiguous).

        Raises:
            ValueError: another shape, or an instruction set that this machine does not have.
        """
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != self.columns or not x.flags.c_contiguous:
            raise ValueError(f"x must be contiguous f32 [M, {self.columns}], not {x.dtype} {x.shape}")
        y = np.empty((len(x), self.channels), np.float32) if out is None else out
        for name, array, shape in (
            ("bias", bias, (self.channels,)),
            ("residual", residual, y.shape),
            ("out", y, y.shape),
        ):
            if array is not None and (array.dtype != np.float32 or array.shape != shape):
                raise ValueError(f"{name} must be f32 {shape}, not {array.dtype} {array.shape}")
        failed = self._library.plancast_linear(
            self._weight,
            x.ctypes.data,
            len(x),
            None if bias is None else bias.ctypes.data,
            None if residual is None else residual.ctypes.data,
            y.ctypes.data,
            threads,
            isa.encode() if isa else None,
        )
        if failed:
            raise ValueError(f"this machine does not have {isa}")
        return y


def available_isas(path: Path) -> tuple[str, ...]:
    """The instruction sets of this machine for which there are kernels, the best first."""
    product = Product(path, *_tiny())
    found = []
    for isa in ISAS:
        try:
            product(np.zeros((1, 1), np.float32), isa=isa)
        except ValueError:
            continue
        found.append(isa)
    return tuple(found)


def _tiny() -> tuple[Weight, NDArray[np.uint8], Activations]:
    from plugins.linear.op import pack

    weight = Weight("int8", np.ones((1, 1), np.int8), np.ones((1, 1), np.float32))
    return weight, pack(weight), "int8"
