"""The quantized weights of a GGUF file, under the names and in the row order of the Hugging Face model.

Names come from gguf's own map. Rows may lie in another order (llama.cpp permutes those of queries and keys); which, is
read off the dense weights that transformers made of the same file. What does not equal them bit for bit stays dense.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zoo.formats.gguf_blocks import block_format, read_blocks
from zoo.formats.side_file import SideFileWriter, read_tensor
from zoo.gguf_header import GgufHeader, GgufTensor
from zoo.progress import Progress
from zoo.safetensors_header import read_safetensors_header

if TYPE_CHECKING:
    from numpy.typing import NDArray


def import_gguf(header: GgufHeader, folder: Path, progress: Progress) -> int:
    """Write the side file of `folder`, which holds the dense weights of the file already. Returns weights stored."""
    dense = {
        name: ref for name, ref in read_safetensors_header(folder / "model.safetensors").items() if len(ref.shape) == 2
    }
    names = _names(header, list(dense))
    writer = SideFileWriter(folder)
    stored = 0
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for done, (name, ref) in enumerate(dense.items()):
            progress.update("importing quantized tensors", done, len(dense))
            tensor = names.get(name)
            if tensor is None or block_format(tensor.type) is None or tensor.shape[1:] != ref.shape[1:]:
                continue
            weight = read_blocks(_bytes(data, tensor), tensor.type, (tensor.shape[0], tensor.shape[1]))
            rows = _matching_rows(weight.dequantize(), read_tensor(ref))
            if rows is not None:
                writer.add(name, weight if np.array_equal(rows, np.arange(len(rows))) else weight.rows(rows))
                stored += 1
    writer.close()
    return stored


def _names(header: GgufHeader, names: list[str]) -> dict[str, GgufTensor]:
    """Hugging Face names -> tensors of the file."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    by_name: dict[str, MODEL_ARCH] = {text: arch for arch, text in MODEL_ARCH_NAMES.items()}
    arch = by_name.get(header.architecture)
    layers = header.metadata.get(f"{header.architecture}.block_count")
    if arch is None or not isinstance(layers, int):
        return {}
    known = get_tensor_name_map(arch, layers)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = {name: tensors.get(known.get_name(name, try_suffixes=(".weight",)) or "") for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None and len(tensor.shape) == 2}


def _bytes(data: mmap.mmap, tensor: GgufTensor) -> NDArray[np.uint8]:
    return np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)


def _matching_rows(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.int64] | None:
    """Which row of `ours` each row of `theirs` is, bit for bit (-0 is 0); None where one is none of them."""
    ours, theirs = ours + np.float32(0), theirs + np.float32(0)
    if np.array_equal(ours, theirs):
        return np.arange(len(theirs))
    where = {row.tobytes(): index for index, row in enumerate(ours)}
    found = [where.get(row.tobytes()) for row in theirs]
    return None if any(index is None for index in found) else np.array(found, np.int64)
