"""A folder with quantized safetensors -> one with dense weights, and the quantized ones beside them.

The dense weights serve whoever computes in floats (the trace, the comparison with Hugging Face); `weights: checkpoint`
takes the quantized ones. Weight after weight, so memory holds one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from zoo.formats.packed import Quantization, read_packed
from zoo.formats.side_file import SafetensorsWriter, SideFileWriter, read_tensor
from zoo.progress import Progress
from zoo.quantized import QuantizedWeight
from zoo.safetensors_header import TensorRef
from zoo.store import require_disk

VERSION = 1  # raise it whenever the same folder would give another one


def unpack_folder(
    source: Path,
    config: dict[str, Any],
    tensors: dict[str, TensorRef],
    quantization: Quantization,
    target: Path,
    progress: Progress,
) -> None:
    """Fill the empty folder `target`. Raises `ZooError` where a weight is damaged or the disk is too small."""
    packed = sum(ref.nbytes for ref in tensors.values())
    require_disk(target, packed * (1 + 32 // quantization.bits), f"the dense copy of {source.name}")
    dense, quantized = SafetensorsWriter(target / "model.safetensors"), SideFileWriter(target)
    for done, (name, weight) in enumerate(read_packed(tensors, quantization, str(source))):
        progress.update("unpacking quantized weights", done, None)
        if isinstance(weight, QuantizedWeight):
            dense.put(name, weight.dequantize())
            quantized.add(name, weight)
        else:
            dense.put(name, read_tensor(weight), weight.dtype)
    dense.close({"format": "pt"})
    quantized.close()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (target / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    for path in source.iterdir():
        wanted = path.suffix in (".json", ".jinja", ".py", ".model", ".txt") or path.name.upper().startswith(
            ("LICEN", "NOTICE")
        )
        if path.is_file() and wanted and not (target / path.name).exists() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
