"""`refit`: put the weights of the model back into the engines of an artifact that was built without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from builder import stages
from builder.backends.stripped import NAME as STRIPPED
from builder.cache import place
from builder.progress import BuildProgress
from builder.quantization.prepare import PreparedWeights, needs_calibration, needs_preparing, prepare_weights
from builder.recipe import Recipe, recipe_from_dict
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.errors import ArtifactError
from runtime.manifest import FileInfo, Manifest, rebuild_hint

if TYPE_CHECKING:
    from zoo.checkpoint import Checkpoint

_CALIBRATION = ".calibration"


def refit(path: str | Path, *, model: str | None = None, progress: BuildProgress | None = None) -> Manifest:
    """Make the artifact at `path` whole, in place: trace and quantize its model again, and fill its engines.

    The libraries that build are needed; a GPU and its library only by TensorRT's engines, not by TensorRT-RTX's.

    Args:
        model: where the model lies now, as a recipe names it (default: where the artifact's recipe says).
        progress: is told where it is.

    Raises:
        ArtifactError: the artifact has its weights, or the model is another one than it was built from.
        PlancastError: what else stands in the way. The artifact is as it was.
    """
    progress = progress or BuildProgress()
    artifact = Artifact.open(Path(path), verify="full")
    manifest, folder = artifact.manifest, artifact.path
    if manifest.backend.properties.get("weights") != "stripped":
        raise ArtifactError(f"{folder}: its engine has its weights already")
    hint = f"name the model that it was built from (--model), or {rebuild_hint(manifest.name)}"
    recipe = recipe_from_dict(manifest.recipe)
    if model is not None:
        recipe = msgspec.structs.replace(recipe, model=model)
    stages.require_libraries()
    with progress:
        with progress.stage("pull") as stage:
            checkpoint = stages.pull(recipe, progress)
            stage.detail = f"{checkpoint.name} from {checkpoint.source}"
        graph = _graph(recipe, checkpoint, progress)
        with progress.stage("refit") as stage, ArtifactWriter(folder) as writer:
            if manifest.backend.name == "tensorrt":
                from builder.backends import tensorrt as backend
            else:
                from builder.backends import tensorrt_rtx as backend
            filled = backend.refit(graph.model, folder, writer.path, hint)
            known: dict[str, FileInfo] = {}
            for name, info in manifest.files.items():
                if name not in filled and name != STRIPPED:
                    place(folder / name, writer.path / name)
                    known[name] = info
            properties = manifest.backend.properties | {"weights": "inside"}
            backend_info = msgspec.structs.replace(manifest.backend, properties=properties)
            whole = writer.commit(msgspec.structs.replace(manifest, backend=backend_info), known)
            stage.detail = f"{len(filled)} engines"
    return whole


def _graph(recipe: Recipe, checkpoint: Checkpoint, progress: BuildProgress) -> stages.QuantizedGraph:
    """The graph that was compiled, its weights in it."""
    from zoo.store import home

    prepared = PreparedWeights()
    if needs_preparing(recipe):
        with progress.stage("calibrate" if needs_calibration(recipe) else "import") as stage:
            prepared = prepare_weights(checkpoint, recipe, home() / "builds" / _CALIBRATION, progress)
            stage.detail = prepared.detail
    with progress.stage("trace"):
        traced = stages.trace(checkpoint, recipe, prepared.dense)
    with progress.stage("fuse"):
        fused = stages.fuse(traced, recipe, progress)
    with progress.stage("quantize"):
        return stages.quantize(fused, recipe, progress, prepared)
