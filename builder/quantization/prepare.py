"""What stands in the graph instead of a checkpoint's own weights: imported, or calibrated. And static KV scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import BuildError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from builder.quantization.kv_scales import StaticScales
    from builder.recipe import Recipe, WeightsConfig
    from zoo.checkpoint import Checkpoint
    from zoo.progress import Progress
    from zoo.quantized import QuantizedRef


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """By checkpoint name: weights that are quantized already, and floats that scales were folded into.

    `kv_scales`: by layer, where the KV cache has static ones.
    """

    quantized: Mapping[str, QuantizedRef] = field(default_factory=dict)
    dense: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    kv_scales: Mapping[int, StaticScales] = field(default_factory=dict)
    detail: str = ""


def needs_preparing(recipe: Recipe) -> bool:
    """Whether anything but rounding to nearest is asked for."""
    return recipe.weights.dtype == "checkpoint" or needs_calibration(recipe)


def needs_calibration(recipe: Recipe) -> bool:
    """Whether a text must be read to quantize the weights or the KV cache."""
    return calibrates_weights(recipe.weights) or recipe.kv.scales == "static"


def calibrates_weights(weights: WeightsConfig) -> bool:
    """Whether a text must be read to quantize the weights."""
    return weights.method != "rtn" or weights.smooth is not None or weights.mixed != type(weights.mixed)()


def prepare_weights(checkpoint: Checkpoint, recipe: Recipe, results: Path, progress: Progress) -> PreparedWeights:
    """Import the checkpoint's quantized weights, or calibrate, as the recipe says.

    Args:
        results: a folder that keeps what calibration made of each layer, for a build that is interrupted.

    Raises:
        BuildError: the checkpoint holds no quantized weights, the calibration text cannot be read, or the model cannot
            be calibrated.
    """
    prepared = PreparedWeights()
    if recipe.weights.dtype == "checkpoint":
        prepared = _imported(checkpoint, recipe.weights)
    elif calibrates_weights(recipe.weights):
        prepared = _calibrated(checkpoint, recipe, results, progress)
    return _with_kv_scales(prepared, checkpoint, recipe, progress) if recipe.kv.scales == "static" else prepared


def _imported(checkpoint: Checkpoint, weights: WeightsConfig) -> PreparedWeights:
    found = {
        name: ref
        for name, ref in checkpoint.quantized().items()
        if not any(fnmatchcase(name, pattern) for pattern in weights.skip)
    }
    if not found:
        raise BuildError(
            f"{checkpoint.name} holds no quantized weights that weights.dtype checkpoint could keep; set it to what to "
            "quantize to, such as int8"
        )
    return PreparedWeights(found, detail=f"{len(found)} weights as the checkpoint has them")


def _calibrated(checkpoint: Checkpoint, recipe: Recipe, results: Path, progress: Progress) -> PreparedWeights:
    import statistics

    from builder.quantization.calibrate import calibrate, calibration_key, keep_recent

    samples = _samples(checkpoint, recipe, progress)
    place = results / calibration_key(recipe.weights, checkpoint.file_hashes(), samples)
    place.mkdir(parents=True, exist_ok=True)
    keep_recent(results, place)
    found = calibrate(checkpoint, recipe.weights, samples, place, progress, trust_remote_code=recipe.trust_remote_code)
    detail = f"{recipe.weights.method} on {samples.size} tokens, {len(found.quantized)} weights"
    if found.errors:
        detail += f", output error {statistics.fmean(found.errors.values()):.1e}"
    if found.detail:
        detail += f"; {found.detail}"
    return PreparedWeights(found.quantized, found.dense, detail=detail)


def _with_kv_scales(
    prepared: PreparedWeights, checkpoint: Checkpoint, recipe: Recipe, progress: Progress
) -> PreparedWeights:
    from builder.quantization.kv_scales import kv_scales

    samples = _samples(checkpoint, recipe, progress)
    found = kv_scales(
        checkpoint,
        recipe.kv,
        samples,
        prepared.quantized,
        prepared.dense,
        progress,
        trust_remote_code=recipe.trust_remote_code,
    )
    detail = f"KV scales of {len(found)} layers on {samples.size} tokens"
    if prepared.detail:
        detail = f"{prepared.detail}; {detail}"
    return replace(prepared, kv_scales=found, detail=detail)


def _samples(checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> NDArray[np.int64]:
    from builder.quantization.text import read_samples

    progress.update("reading the calibration text", 0, None)
    return read_samples(recipe.weights.calibration, checkpoint.folder, max_context_len=recipe.limits.max_context_len)
