"""GGUF's block formats as integers, scales and minima: exact, with nothing rounded twice.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Q8_0, Q4_0, Q5_0 and Q6_K are scale times
integer; Q4_1, Q5_1, Q4_K and Q5_K add a minimum a group. Products of their factors (an f16 by 6 or 8 bits) are exact in
f32, so `QuantizedWeight.dequantize` gives the bits that gguf's own dequantization gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from zoo.gguf_header import GGML_TYPES
from zoo.quantized import QuantizedWeight, WeightFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES = {name: (elements, nbytes) for name, elements, nbytes in GGML_TYPES.values()}


def block_format(kind: str) -> WeightFormat | None:
    """The format of a tensor of GGML type `kind`; None for a type that is not integers and scales."""
    return _FORMATS.get(kind)


def read_blocks(data: NDArray[np.uint8], kind: str, shape: tuple[int, int]) -> QuantizedWeight:
    """The tensor `[N, K]` of GGML type `kind` in `data` (its bytes)."""
    elements, nbytes = _BLOCK_BYTES[kind]
    rows, columns = shape
    blocks = data.reshape(rows * columns // elements, nbytes)
    values, scale, minimum = _READERS[kind](blocks)
    fmt = _FORMATS[kind]
    groups = (rows, columns // fmt.group)
    return QuantizedWeight(
        fmt.kind,
        values.reshape(rows, columns),
        scale.reshape(groups),
        minimum=None if minimum is None else minimum.reshape(groups),
    )


def _f16(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The f16 at byte `at` of each block, as f32 `[B, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _halves(packed: NDArray[np.uint8]) -> NDArray:
    """Bytes `[B, n]` -> low halves, then high halves: `[B, 2 n]`."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray:
    """Four bytes `[B, 4]` -> their 32 bits, as 0 or 16: `[B, 32]`."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks):
    return _halves(blocks[:, 2:18]).astype(np.int8) - np.int8(8), _f16(blocks, 0), None


def _q4_1(blocks):
    return _halves(blocks[:, 4:20]), _f16(blocks, 0), _f16(blocks, 2)


def _q5_0(blocks):
    values = _halves(blocks[:, 6:22]) | _fifth_bits(blocks[:, 2:6])
    return values.astype(np.int8) - np.int8(16), _f16(blocks, 0), None


def _q5_1(blocks):
    return _halves(blocks[:, 8:24]) | _fifth_bits(blocks[:, 4:8]), _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks):
    return np.ascontiguousarray(blocks[:, 2:34]).view(np.int8), _f16(blocks, 0), None


def _k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The 12 bytes of eight 6-bit scales and eight 6-bit minima: two `[B, 8]`."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    minimum = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q4_k(blocks):
    scale, minimum = _k_scales(blocks[:, 4:16])
    # Four runs of 32 bytes: the low halves are one group of 32 values, the high halves the next.
    runs = blocks[:, 16:144].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (runs & 15), _f16(blocks, 0) * scale, -(_f16(blocks, 2) * minimum)


def _q5_k(blocks):
    scale, minimum = _k_scales(blocks[:, 4:16])
    low = blocks[:, 48:176].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    values = (low & 15).reshape(-1, 8, 32) | ((high & 1) << 4)
    return values, _f16(blocks, 0) * scale, -(_f16(blocks, 2) * minimum)


def _q6_k(blocks):
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    values = (low & 15).reshape(-1, 8, 32) | ((high & 3) << 4).reshape(-1, 8, 32)
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return values.astype(np.int8) - np.int8(32), _f16(blocks, 208) * scale, None


_READERS: dict[str, Callable] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
_FORMATS = {
    "Q4_0": WeightFormat("int4", 32),
    "Q4_1": WeightFormat("uint4", 32, minimum=True),
    "Q5_0": WeightFormat("int8", 32),
    "Q5_1": WeightFormat("uint8", 32, minimum=True),
    "Q8_0": WeightFormat("int8", 32),
    "Q4_K": WeightFormat("uint4", 32, minimum=True),
    "Q5_K": WeightFormat("uint8", 32, minimum=True),
    "Q6_K": WeightFormat("int8", 16),
}
