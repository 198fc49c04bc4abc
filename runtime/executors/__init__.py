"""Executors, one a backend. `open_executor` picks the one that an artifact was built for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import ArtifactError

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import Executor


def open_executor(artifact: Artifact, *, num_threads: int | None = None) -> Executor:
    """Load the artifact's engine. `num_threads` overrides the artifact's own choice.

    Raises:
        ArtifactError: the engine does not load here; the message says what to do.
    """
    name = artifact.manifest.backend.name
    if name == "openvino":
        from runtime.executors.openvino import OpenVINOExecutor

        return OpenVINOExecutor(artifact, num_threads=num_threads)
    raise ArtifactError(f"{artifact.path}: its backend {name!r} has no executor in this plancast, which has openvino")
