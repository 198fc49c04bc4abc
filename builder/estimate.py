"""What a build will take, before it starts: memory, disk and time, from the model's size and the recipe's dtypes.

The factors were measured (see the constants) and lean to the safe side. A build that does not fit is refused with the
numbers, since the alternative is a machine that swaps, or a process that the system kills.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from builder.quantization.prepare import needs_calibration
from builder.recipe import Recipe
from runtime.errors import BuildError
from runtime.memory import FreeMemory, available_memory, format_size

# With scales; an int4 model's are f32 in the engine. A quantized checkpoint takes 8 bits a weight at most.
_DTYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.75, "fp8": 1.0, "checkpoint": 1.2}
MIB, GIB = 1 << 20, 1 << 30

# Measured on SmolLM2-135M and a random Llama of 402M parameters (torch 2.13, OpenVINO 2026.4.1, resident bytes with the
# mapped files: trace 0.57 GiB; compile 2.0 and 4.5 GiB in f32, 2.9 in bf16, 1.5 and 2.3 in int8; comparison 2.5).
_LIBRARIES = 600 * MIB  # torch, transformers, onnx and openvino, loaded
_LAYER = 6 * MIB  # of the graph
_COMPILED = 1.3  # times the stored weights: what the backend holds while it compiles
_EMBEDDING = 6  # bytes an element: a quantized embedding is read through a wider copy
_REFERENCE = 4.4  # bytes a parameter: the original in f32
_DISK_MARGIN = 256 * MIB  # stays free

# Processor seconds of one core (Zen 4), most of them used one core at a time.
_TRACE_SECONDS, _TRACE_SECONDS_LAYER = 6.0, 0.7
_COMPILE_SECONDS, _COMPILE_SECONDS_BYTE = 2.0, 10e-9
_CALIBRATE_SECONDS = 2e-10  # a parameter and calibration token, over all cores: a pass for each group of a layer
_COMPARE_SECONDS, _COMPARE_SECONDS_PARAMETER = 12.0, 250e-9  # the latter over all cores


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes that an estimate needs."""

    parameters: int
    layers: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Peak memory in bytes by stage, disk in bytes by what for, and seconds by stage."""

    memory: dict[str, int]
    disk: dict[str, int]
    seconds: dict[str, float]

    @property
    def peak_memory(self) -> int:
        return max(self.memory.values())

    @property
    def peak_stage(self) -> str:
        return max(self.memory, key=lambda stage: self.memory[stage])

    @property
    def total_disk(self) -> int:
        return sum(self.disk.values())

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def estimate(recipe: Recipe, size: ModelSize) -> Estimate:
    """What building `recipe` takes, given its model is on disk."""
    from builder.parity import WINDOW, logits_bytes

    weights = int(size.parameters * _DTYPE_BYTES[recipe.weights.dtype])
    base = _LIBRARIES + _LAYER * size.layers
    embedding = 0 if recipe.weights.dtype == "f32" else _EMBEDDING * size.vocab_size * size.hidden_size
    held = int(size.parameters * 4.0) if recipe.weights.dtype == "fp8" else weights  # OpenVINO computes fp8 as f32
    engine = int(_COMPILED * held) + embedding
    # The portable form is mapped on top of what the backend holds.
    memory = {"trace": base, "compile": base + engine + weights}
    seconds = {
        "trace": _TRACE_SECONDS + _TRACE_SECONDS_LAYER * size.layers,
        "compile": _COMPILE_SECONDS + _COMPILE_SECONDS_BYTE * weights,
    }
    # While the portable form is written, the weights lie on the disk twice; later the compiled form takes that place.
    disk = {"engine": weights, "compiled form, temporary files": int(1.1 * weights)}
    if needs_calibration(recipe):
        tokens = recipe.weights.calibration.samples * recipe.weights.calibration.tokens
        layer = size.parameters // size.layers
        # The embedding, a layer with its copies and moments, and what goes into it and comes out.
        memory["calibrate"] = base + 4 * (
            size.vocab_size * size.hidden_size + 6 * layer + 12 * tokens * size.hidden_size
        )
        seconds["calibrate"] = _CALIBRATE_SECONDS * size.parameters * tokens / (os.cpu_count() or 1)
        disk["calibration"] = weights
    if recipe.parity.enabled:
        window = 4 * WINDOW * size.vocab_size
        reference = _LIBRARIES + int(_REFERENCE * size.parameters) + 3 * window
        memory["parity"] = base + max(engine + weights + window, reference)
        seconds["parity"] = _COMPARE_SECONDS + _COMPARE_SECONDS_PARAMETER * size.parameters / (os.cpu_count() or 1)
        disk["comparison"] = logits_bytes(size.vocab_size)
    return Estimate(memory, disk, seconds)


def require(estimate: Estimate, *, cache: Path, free: FreeMemory | None = None) -> None:
    """Raise `BuildError` with the numbers unless memory and disk suffice. `cache` is where the engine is built."""
    free = free or available_memory()
    if estimate.peak_memory > free.bytes:
        hint = (
            "build without the comparison (--set parity.enabled=false), or "
            if estimate.peak_stage == "parity"
            else "free memory, or "
        )
        raise BuildError(
            f"the build takes about {format_size(estimate.peak_memory)} of memory (in {estimate.peak_stage}), and "
            f"{format_size(free.bytes)} are free ({free.limited_by}); {hint}use a larger machine"
        )
    require_disk(cache, estimate.total_disk, "the build")


def require_disk(folder: Path, nbytes: int, what: str) -> None:
    """Raise `BuildError` with the numbers unless `nbytes` and a margin are free where `folder` is, or will be."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes + _DISK_MARGIN > free:
        raise BuildError(
            f"{what} takes about {format_size(nbytes)} of disk in {folder}, where {format_size(free)} are free "
            f"({format_size(_DISK_MARGIN)} must stay free); make room, or use another disk (PLANCAST_HOME, --out)"
        )


def same_disk(one: Path, other: Path) -> bool:
    """Whether files can be linked from `one` into `other` (either may not exist yet)."""
    devices = []
    for path in (one.absolute(), other.absolute()):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        devices.append(existing.stat().st_dev)
    return devices[0] == devices[1]
