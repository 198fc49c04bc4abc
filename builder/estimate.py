"""What a build will take, before it starts: memory, disk and time, from the model's size and the recipe's dtypes.

The factors were measured (see the constants) and lean to the safe side. A build that does not fit is refused with the
numbers, since the alternative is a machine that swaps, or a process that the system kills.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from builder.recipe import Recipe
from runtime.errors import BuildError
from runtime.memory import FreeMemory, available_memory, format_size

_DTYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0}
MIB, GIB = 1 << 20, 1 << 30

# Measured on SmolLM2-135M and random Llamas (2 cores, torch 2.13, OpenVINO 2026.4.1).
_LIBRARIES = 700 * MIB  # torch, transformers, onnx and openvino, loaded
_TRACE_PER_LAYER = 6 * MIB
_REFERENCE_LIBRARIES = 600 * MIB
_DISK_MARGIN = 256 * MIB  # stays free


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
    embedding = size.vocab_size * size.hidden_size
    full = 4 * size.parameters
    # The backend holds the stored weights, and one more copy packed for its kernels.
    packed = int(size.parameters * _DTYPE_BYTES[recipe.backend.compute])
    memory = {
        "trace": _LIBRARIES + _TRACE_PER_LAYER * size.layers,
        "compile": _LIBRARIES + _TRACE_PER_LAYER * size.layers + 2 * weights + packed + 8 * embedding,
    }
    disk = {"engine": weights}
    cores = os.cpu_count() or 1
    seconds = {
        "trace": 5.0 + 0.35 * size.layers,
        "compile": 3.0 + size.parameters / (40e6 * cores),
    }
    if recipe.backend.blob:
        disk["compiled form"] = max(weights, packed)
    if recipe.parity.enabled:
        window = 4 * WINDOW * size.vocab_size
        memory["parity"] = _LIBRARIES + max(
            weights + packed + window, _REFERENCE_LIBRARIES + int(1.1 * full) + 3 * window
        )
        disk["comparison"] = logits_bytes(size.vocab_size)
        seconds["parity"] = 5.0 + size.parameters / (10e6 * cores)
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
