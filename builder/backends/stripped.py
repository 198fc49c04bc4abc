"""Engines without their weights: cut out of the files, and put back byte for byte.

TensorRT-RTX stores weights as they come, or transposed, each in one run of bytes or a few. Its own way of leaving them
out (STRIP_PLAN) and of putting them in (the refitter) takes a GPU for both, so here it is the file that is cut: what is
left says where which bytes of which tensor belong, and the SHA-256 of the whole says whether they came back.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import ArtifactError
from runtime.versioned_file import read_versioned

if TYPE_CHECKING:
    import onnx_ir as ir

NAME = "stripped.json"
_FORMAT = 1
_LEAST = 64  # bytes: shorter runs stay
_NEEDLE = 256  # bytes that a run is looked for by


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that are missing: at `offset` of the whole file, from `start` on of a tensor's bytes."""

    offset: int
    bytes: int
    tensor: str
    columns: bool  # of the tensor transposed
    start: int


class StrippedFile(msgspec.Struct, frozen=True):
    """A file that was cut: its length and SHA-256 (hex) while it was whole, and the holes in order."""

    bytes: int
    sha256: str
    holes: tuple[Hole, ...]


class Stripped(msgspec.Struct, frozen=True):
    """What `stripped.json` says, by file name."""

    files: dict[str, StrippedFile]
    format: int = _FORMAT


def weights_of(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """The initializers of a graph by name, but for small ones."""
    return {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _LEAST
    }


def arranged(tensor: ir.TensorProtocol, *, columns: bool) -> bytes:
    """The tensor's bytes row by row, or those of its transpose. 4-bit elements: two a byte, the first one low."""
    if not columns:
        return tensor.tobytes()
    array = np.asarray(tensor.numpy()).T
    if tensor.dtype.bitwidth != 4:
        return np.ascontiguousarray(array).tobytes()
    codes = array.astype(np.int8).reshape(-1).view(np.uint8) & 15
    return (codes[::2] | codes[1::2] << 4).tobytes()


def strip_file(path: Path, weights: Mapping[str, ir.TensorProtocol]) -> StrippedFile:
    """Cut what is found of `weights` out of the file `path`, in place."""
    data = path.read_bytes()
    holes = find_weights(data, weights)
    end, kept = 0, []
    for hole in holes:
        kept.append(data[end : hole.offset])
        end = hole.offset + hole.bytes
    path.write_bytes(b"".join([*kept, data[end:]]))
    return StrippedFile(len(data), hashlib.sha256(data).hexdigest(), tuple(holes))


def find_weights(data: bytes, weights: Mapping[str, ir.TensorProtocol]) -> list[Hole]:
    """Where the bytes of `weights` lie in `data`, in order and without overlap."""
    holes: list[Hole] = []
    for name, tensor in weights.items():
        for columns in (False, True) if len(tensor.shape) == 2 else (False,):
            found = list(_runs(data, name, tensor, columns, holes))
            for hole in found:
                bisect.insort(holes, hole, key=_offset)
            if found:
                break
    return holes


def _runs(data: bytes, name: str, tensor: ir.TensorProtocol, columns: bool, holes: list[Hole]) -> Iterator[Hole]:
    """The runs of a tensor's bytes in `data` outside of `holes`: what was merged may lie there in pieces."""
    raw = arranged(tensor, columns=columns)
    whole, wanted = np.frombuffer(data, np.uint8), np.frombuffer(raw, np.uint8)
    taken, start = list(holes), 0
    while len(raw) - start >= _LEAST:
        needle = raw[start : start + _NEEDLE]
        offset = data.find(needle)
        while offset >= 0 and _room(taken, offset, len(data)) < len(needle):
            offset = data.find(needle, offset + 1)
        if offset < 0:
            return
        most = min(len(raw) - start, _room(taken, offset, len(data)))
        length = _equal(whole[offset : offset + most], wanted[start : start + most])
        hole = Hole(offset, length, name, columns, start)
        bisect.insort(taken, hole, key=_offset)
        yield hole
        start += length


def _equal(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> int:
    """How many bytes are the same before the first that differs."""
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)


def _room(taken: list[Hole], offset: int, end: int) -> int:
    """Bytes from `offset` to the next hole or the end; 0 within a hole."""
    at = bisect.bisect_right(taken, offset, key=_offset)
    if at and taken[at - 1].offset + taken[at - 1].bytes > offset:
        return 0
    return (taken[at].offset if at < len(taken) else end) - offset


def _offset(hole: Hole) -> int:
    return hole.offset


def filled(path: Path, stripped: StrippedFile, weight: Callable[[str], ir.TensorProtocol | None], hint: str) -> bytes:
    """The file `path` with its weights in it; `weight(name)` gives them.

    Raises:
        ArtifactError: a weight is missing or another one than was cut out, with `hint`.
    """
    rest, done, used, end = path.read_bytes(), [], 0, 0
    for hole in stripped.holes:
        length = hole.offset - end
        done.append(rest[used : used + length])
        used, end = used + length, hole.offset + hole.bytes
        tensor = weight(hole.tensor)
        if tensor is None:
            raise ArtifactError(f"{path}: {hole.tensor} belongs into it, and the model has no such weight; {hint}")
        done.append(arranged(tensor, columns=hole.columns)[hole.start : hole.start + hole.bytes])
    data = b"".join([*done, rest[used:]])
    if len(data) != stripped.bytes or hashlib.sha256(data).hexdigest() != stripped.sha256:
        raise ArtifactError(f"{path}: the weights are not those that were taken out; {hint}")
    return data


def write_stripped(folder: Path, files: dict[str, StrippedFile]) -> None:
    """Say in `folder` what was cut out of which file."""
    (folder / NAME).write_bytes(msgspec.json.encode(Stripped(files)))


def read_stripped(path: Path, hint: str) -> dict[str, StrippedFile]:
    """What `write_stripped` wrote. Raises `ArtifactError` where it is damaged or of another format."""
    return read_versioned(path, Stripped, _FORMAT, hint).files
