"""Reads and checks a safetensors header: where each tensor lies in the file.

Format: https://github.com/huggingface/safetensors#format. A header that does not fit the file is refused with one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from runtime.errors import ZooError

_MAX_HEADER = 100_000_000  # bytes, as the format's own reader allows
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor in a file: `dtype` as safetensors names it (F32, BF16, ...), `offset` and `nbytes` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the file's beginning
    nbytes: int


def read_safetensors_header(path: Path) -> dict[str, TensorRef]:
    """The tensors in the file at `path`, by name. Raises `ZooError` where it is truncated or corrupt."""
    path = path.resolve()  # loaders refuse the hub cache's links
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ZooError(f"{path} is truncated or not safetensors: {size} bytes, its header takes {length + 8}")
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, 8 + length, name, entry) for name, entry in header.items()}
        _check_layout(path, 8 + length, size, tensors)
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ZooError(f"{path} has a corrupt safetensors header: {error}; fetch it again") from None
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a name stands twice")
    return dict(pairs)


def _tensor(path: Path, start: int, name: str, entry: Any) -> TensorRef:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has no valid shape or offsets")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise ValueError(f"tensor {name!r} of {dtype} {shape} takes {bits / 8:g} bytes, its offsets span {end - begin}")
    return TensorRef(path, dtype, tuple(shape), start + begin, end - begin)


def _check_layout(path: Path, start: int, size: int, tensors: dict[str, TensorRef]) -> None:
    """The tensors must follow each other without gap or overlap to the end of the file."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise ValueError(f"tensor {name!r} begins at byte {tensor.offset}, the one before it ends at {position}")
        position += tensor.nbytes
    if position > size:
        raise ZooError(f"{path} is truncated: its tensors end at byte {position}, the file has {size}; fetch it again")
    if position < size:
        raise ValueError(f"{size - position} bytes after the last tensor belong to none")
