"""The quantized weights of a checkpoint that plancast converted, beside its dense ones: one safetensors file.

`model.safetensors` holds what they dequantize to (f32), for all who know nothing of quantization; this file holds the
integers, scales, zero points and minima, by the same names. Written and read one weight at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from runtime.errors import ZooError
from zoo.quantized import KINDS, QuantizedRef, QuantizedWeight, WeightFormat, pack4, unpack4
from zoo.safetensors_header import TensorRef, read_safetensors_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "plancast-quantized.safetensors"
# fp8 is read as its bits.
_DTYPES: dict[str, Any] = {
    "U8": np.uint8, "I8": np.int8, "F16": np.float16, "F32": np.float32, "F64": np.float64, "I32": np.int32,
    "I64": np.int64, "BF16": ml_dtypes.bfloat16, "F8_E4M3": np.uint8,
}  # fmt: skip
_PARTS = ("values", "scale", "zero", "minimum", "order")


class SafetensorsWriter:
    """Writes a safetensors file as tensors come. Data goes to a scratch file first: the header has all offsets."""

    def __init__(self, path: Path):
        self.path = path
        self._scratch = path.with_name(f".{path.name}.data")
        self._data = self._scratch.open("wb")
        self.header: dict[str, Any] = {}

    def put(self, name: str, array: NDArray, dtype: str | None = None) -> None:
        """Add a tensor; `dtype`: its name in the format, where NumPy's dtype does not tell."""
        array = np.ascontiguousarray(array)
        code = dtype or next(code for code, known in _DTYPES.items() if array.dtype == known)
        begin = self._data.tell()
        self._data.write(array.tobytes())
        self.header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, self._data.tell()]}

    def close(self, metadata: dict[str, str]) -> bool:
        """Finish the file. Returns whether there is one: no tensors, no file."""
        self._data.close()
        if self.header:
            text = json.dumps({"__metadata__": metadata, **self.header}).encode()
            text += b" " * (-len(text) % 8)
            with self.path.open("wb") as file, self._scratch.open("rb") as data:
                file.write(len(text).to_bytes(8, "little") + text)
                shutil.copyfileobj(data, file, 1 << 24)
        self._scratch.unlink()
        return bool(self.header)


class SideFileWriter:
    """Writes the quantized weights of a folder, one after another."""

    def __init__(self, folder: Path):
        self._file = SafetensorsWriter(folder / NAME)
        self._formats: dict[str, Any] = {}

    def add(self, name: str, weight: QuantizedWeight) -> None:
        """Store `weight` under the name of the dense weight that it stands for."""
        self._formats[name] = {"kind": weight.kind, "shape": list(weight.values.shape), "group": weight.group}
        values = pack4(weight.values) if KINDS[weight.kind][1] == 4 else weight.values
        self._file.put(f"{name}.values", values)
        self._file.put(f"{name}.scale", _narrow(weight.scale))
        if weight.zero is not None:
            self._file.put(f"{name}.zero", weight.zero)
        if weight.minimum is not None:
            self._file.put(f"{name}.minimum", _narrow(weight.minimum))
        if weight.order is not None:
            # The digest spares a reader the order itself.
            self._formats[name]["order"] = weight.format.order
            self._file.put(f"{name}.order", weight.order.astype(np.int64))

    def close(self) -> bool:
        """Finish the file. Returns whether there is one: no weights, no file."""
        return self._file.close({"plancast": json.dumps(self._formats)})


def read_side_file(folder: Path) -> dict[str, QuantizedRef]:
    """The quantized weights in `folder` by the names of the dense ones; empty where there are none.

    Raises `ZooError` where the file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return {}
    tensors = read_safetensors_header(path)
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        formats = json.loads(header["__metadata__"]["plancast"])
        return dict(_refs(tensors, formats))
    except (KeyError, ValueError, TypeError) as error:
        raise ZooError(f"{path} is corrupt ({error!r}); remove {folder} and build again") from None


def _refs(tensors: dict[str, TensorRef], formats: dict[str, Any]) -> Iterator[tuple[str, QuantizedRef]]:
    for name, stated in formats.items():
        parts = {part: tensors.get(f"{name}.{part}") for part in _PARTS}
        kind, shape = stated["kind"], (int(stated["shape"][0]), int(stated["shape"][1]))
        fmt = WeightFormat(
            kind,
            int(stated["group"]),
            zero=parts["zero"] is not None,
            minimum=parts["minimum"] is not None,
            order=stated.get("order"),
        )
        if kind not in KINDS or parts["values"] is None or parts["scale"] is None:
            raise KeyError(name)

        def load(kind: str = kind, shape: tuple[int, int] = shape, parts: dict = parts) -> QuantizedWeight:
            found: dict[str, Any] = {part: None if ref is None else read_tensor(ref) for part, ref in parts.items()}
            if KINDS[kind][1] == 4:
                found["values"] = unpack4(found["values"], signed=kind == "int4").reshape(shape)
            for part in ("scale", "minimum"):
                found[part] = None if found[part] is None else found[part].astype(np.float32)
            return QuantizedWeight(kind, **found)

        yield name, QuantizedRef(fmt, shape, load)


def read_tensor(ref: TensorRef) -> NDArray:
    """A tensor of this file, or of any other whose dtype NumPy knows."""
    return np.fromfile(
        ref.file, _DTYPES[ref.dtype], ref.nbytes // np.dtype(_DTYPES[ref.dtype]).itemsize, offset=ref.offset
    ).reshape(ref.shape)


def _narrow(array: NDArray[np.float32]) -> NDArray:
    """As f16 where that loses nothing."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else array
