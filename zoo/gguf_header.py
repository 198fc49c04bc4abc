"""Reads a GGUF file's header: metadata and the tensor table, each length checked against the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
A truncated or corrupt file is refused here with one line, before any heavy library is imported.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from runtime.errors import ZooError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Metadata value types of fixed size, by their number in the format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

# Weight types that gguf's `dequantize` reads exactly: number in the format -> (name, elements a block, bytes a block).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file. `shape` is in row-major order (the file stores it reversed), `offset` from its start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    @property
    def num_elements(self) -> int:
        """Weights in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def context_length(self) -> int | None:
        return self.metadata.get(f"{self.architecture}.context_length")


class _TruncatedError(Exception):
    pass


class _Reader:
    """A cursor over the mapped file that refuses to read past its end."""

    def __init__(self, buffer: mmap.mmap):
        self.buffer = buffer
        self.position = 0

    def take(self, size: int) -> int:
        start = self.position
        if size > len(self.buffer) - start:
            raise _TruncatedError
        self.position = start + size
        return start

    def unpack(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.buffer, self.take(layout.size))[0]

    def string(self) -> str:
        size = self.unpack("Q")
        start = self.take(size)
        return self.buffer[start : start + size].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a metadata value of unknown type {kind}")
        element, count = self.unpack("I"), self.unpack("Q")
        if element in _SCALARS:
            layout = struct.Struct(f"<{_SCALARS[element]}")
            start = self.take(layout.size * count)
            return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self.buffer, start))
        if element != _STRING:
            raise ValueError(f"a metadata array of unknown element type {element}")
        if count > (len(self.buffer) - self.position) // 8:  # each string takes eight bytes at least
            raise _TruncatedError
        return [self.string() for _ in range(count)]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises `ZooError` where the file is missing, not GGUF, truncated, corrupt, or holds weights of a type that cannot
    be dequantized exactly.
    """
    if not os.path.isfile(path):  # pathlib's raises where the name is too long
        raise ZooError(f"no GGUF file at {path}")
    size = path.stat().st_size
    if size < 24:
        raise ZooError(f"{path} is not a GGUF file: {size} bytes, a header takes 24 at least")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        try:
            return _parse(path, _Reader(buffer), size)
        except _TruncatedError:
            raise ZooError(
                f"{path} is truncated or corrupt: its header runs past the file's end ({size} bytes); fetch it again"
            ) from None
        except (ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
            raise ZooError(f"{path} is a corrupt GGUF file: {error}; fetch it again") from None


def _parse(path: Path, reader: _Reader, size: int) -> GgufHeader:
    magic = reader.buffer[:4]
    if magic != MAGIC:
        raise ZooError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    reader.take(4)
    version = reader.unpack("I")
    if version not in VERSIONS:
        known = " and ".join(str(number) for number in VERSIONS)
        raise ZooError(f"{path} is GGUF version {version}; versions {known} (little endian) can be read")
    num_tensors, num_pairs = reader.unpack("Q"), reader.unpack("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.string()
        metadata[key] = reader.value(reader.unpack("I"))
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("no general.architecture in its metadata")
    if metadata.get("split.count", 1) > 1:
        raise ZooError(
            f"{path} is one of {metadata['split.count']} parts; merge them first (llama.cpp's llama-gguf-split --merge)"
        )
    table = []
    for _ in range(num_tensors):
        name, num_dims = reader.string(), reader.unpack("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions, {_MAX_DIMS} at most are allowed")
        shape = tuple(reader.unpack("Q") for _ in range(num_dims))[::-1]
        table.append((name, shape, reader.unpack("I"), reader.unpack("Q")))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-reader.position // alignment) * alignment
    tensors = tuple(_tensor(path, size, data_start, *entry) for entry in table)
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ValueError("it names a tensor twice")
    return GgufHeader(path, version, metadata, tensors)


def _tensor(path: Path, size: int, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int):
    if kind not in GGML_TYPES:
        supported = ", ".join(entry[0] for entry in GGML_TYPES.values())
        raise ZooError(
            f"{path}: tensor {name!r} has the GGML type {kind}, which cannot be dequantized; supported: {supported}"
        )
    type_name, block_elements, block_bytes = GGML_TYPES[kind]
    if not shape or shape[-1] % block_elements:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} is no whole number of {type_name} blocks")
    nbytes = prod(shape) // block_elements * block_bytes
    end = data_start + offset + nbytes
    if end > size:
        raise ZooError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}; fetch it again")
    return GgufTensor(name, shape, type_name, data_start + offset, nbytes)
