"""Loads the two forms of an OpenVINO engine: the portable IR and the CPU plugin's compiled blob."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from plugins.block.openvino import fuse_blocks
from plugins.linear.openvino import lower_linear
from plugins.paged_attention.memory import zeroed
from plugins.paged_attention.openvino import reading_core, restore_nodes

# Whether activations may be rounded to int8 in groups; our kernels' groups are 32 wide, whatever it says.
_ACTIVATION_GROUPS = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_COMPRESSED = (ov.Type.bf16, ov.Type.f16)


class OpenVINOEngine:
    """A core that knows our operators. It must outlive what it compiled: the weights of a blob lie in its memory.

    Args:
        native: our shared library of C++ operators; without it, blobs cannot be loaded.
        properties: every property that a compilation gets, under OpenVINO's names.
        own_linear: whether a compilation takes our C++ kernels, where `native` brings them, for products with weights
            that they know (`plugins.linear.openvino`). The portable form keeps OpenVINO's own, so that it compiles
            anywhere.
    """

    def __init__(self, native: Path | None, properties: dict[str, str], *, own_linear: bool = False):
        self.core = reading_core(native)
        self.properties = properties
        self.lowered = 0  # products that the last compilation gave to our kernels
        self.blocks = 0  # groups of nodes that it made one
        # Attention nodes of our kernels that became OpenVINO's in the last compilation, since `native` is None.
        self.attention_replaced = 0
        self._linear = native if own_linear else None
        self._blob: NDArray[np.uint8] | None = None

    def read_ir(self, path: Path) -> ov.Model:
        """The IR at `path` (.xml, its weights beside it in .bin, mapped) as it is compiled: our operations in the place
        of what they compute. Raises `RuntimeError`."""
        model = self.core.read_model(path)
        self.attention_replaced = restore_nodes(model)
        if self._linear is not None:
            self.lowered = lower_linear(
                model,
                self._linear,
                activations="int16" if self.properties.get(_ACTIVATION_GROUPS, "0") == "0" else "int8",
                compute=self.properties.get("INFERENCE_PRECISION_HINT", "f32"),
            )
            self.blocks = fuse_blocks(model, self._linear)
        _keep_compressed(model)
        return model

    def compile_ir(self, path: Path) -> ov.CompiledModel:
        """Compile the IR at `path`. Raises `RuntimeError`."""
        return self.compile(self.read_ir(path))

    def compile(self, model: ov.Model) -> ov.CompiledModel:
        """Compile what `read_ir` returned. Raises `RuntimeError`."""
        return self.core.compile_model(model, "CPU", self.properties)

    def import_blob(self, path: Path) -> ov.CompiledModel:
        """Load a compiled form. Raises `RuntimeError` where this OpenVINO, or this CPU, is not the one it was made for.

        The blob does not hold the properties that it was compiled with: `self.properties` must be the same ones, but
        for the number of threads.
        """
        # On huge pages, where mapping the file has small ones: with those a step waits for page walks (measured:
        # 10.5 ms, not 8.6). Weights that need no repacking stay where they are; OpenVINO keeps no hold on the array.
        self._blob = zeroed(path.stat().st_size)
        with path.open("rb") as file:
            if file.readinto(self._blob.data) != self._blob.nbytes:
                raise RuntimeError(f"{path} has become shorter while it was read")
        return self.core.import_model(ov.Tensor(self._blob, shared_memory=True), "CPU", self.properties)


def reason(error: RuntimeError) -> str:
    """What OpenVINO has to say, in a line: its summary, else its last line; the others name its own source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    if "Summary:" in lines:
        return "; ".join(line.removeprefix("-- ") for line in lines[lines.index("Summary:") + 1 :])
    return lines[-1]


def _keep_compressed(model: ov.Model) -> None:
    """Mark the conversions of stored bf16 and f16 weights as decompressions.

    Without the mark, which IR loses, OpenVINO folds them to f32 when it computes in f32, at twice the memory and time.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Convert":
            continue
        stored = node.input_value(0)
        if stored.get_element_type() in _COMPRESSED and stored.get_node().get_type_name() == "Constant":
            node.get_rt_info()["decompression_0"] = ""
