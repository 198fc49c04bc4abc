"""Executors, one a backend. `open_executor` picks the one that an artifact was built for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plugins  # noqa: F401 (before any executor imports OpenVINO, which would report it)
from runtime.errors import ArtifactError, PlancastError

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
        from runtime.executors.native import open_native

        if (executor := open_native(artifact, num_threads)) is not None:
            return executor
        from runtime.executors.openvino import OpenVINOExecutor

        return OpenVINOExecutor(artifact, num_threads=num_threads)
    if name == "torch":
        from runtime.executors.torch import TorchDeviceExecutor, TorchExecutor

        # Interpreted kernels sample far more slowly than the host does.
        on_gpu = artifact.manifest.backend.device == "CUDA"
        return (TorchDeviceExecutor if on_gpu else TorchExecutor)(artifact, num_threads=num_threads)
    if name in ("tensorrt", "tensorrt_rtx"):
        return _open_segments(artifact)
    raise ArtifactError(
        f"{artifact.path}: its backend {name!r} has no executor in this plancast, which has openvino, torch, tensorrt "
        "and tensorrt_rtx"
    )


def _open_segments(artifact: Artifact) -> Executor:
    """Engines of TensorRT or TensorRT-RTX on this machine's first GPU."""
    backend = artifact.manifest.backend
    if backend.properties.get("weights") == "stripped":
        raise ArtifactError(
            f"{artifact.path}: its engines were built without weights; put them in: plancast refit {artifact.path}"
        )
    from runtime.executors.segments.cuda import CudaDevice
    from runtime.executors.segments.executor import SegmentExecutor

    try:
        device = CudaDevice(backend=backend.name)
    except PlancastError as error:
        built = backend.properties.get("compute_capabilities", "").replace(" ", ", ")
        raise ArtifactError(f"{artifact.path}: built for NVIDIA GPUs ({built}); {error}") from None
    return SegmentExecutor(artifact, device)
