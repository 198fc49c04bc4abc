"""An artifact for a simulated GPU: a plan, and files of engines that the simulation runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from simulated_gpu import SimulatedGpu
from tiny_artifact import tiny_manifest

from builder.backends.segment_plan import ENGINE
from runtime.artifact import Artifact
from runtime.executors.segments.executor import SegmentExecutor
from runtime.executors.segments.plan import SegmentPlan
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo, FileInfo, Limits


class DeviceArtifact:
    """`plan` joins the engines in `folder` and the kernels `variants`."""

    def __init__(
        self, folder: Path, backend: str, plan: SegmentPlan, variants: Mapping[str, Any], kv: KvLayout, built_for: str
    ):
        self.plan, self.variants = plan, variants
        (folder / ENGINE).write_bytes(msgspec.json.encode(plan))
        info = BackendInfo(
            name=backend, version="1.7.1", device="CUDA", engine=ENGINE, properties={"compute_capabilities": built_for}
        )
        limits = Limits(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)
        manifest = tiny_manifest(backend=info, kv=kv, limits=limits)
        files = {path.name: FileInfo("", path.stat().st_size) for path in folder.iterdir()}
        self.artifact = Artifact(folder, msgspec.structs.replace(manifest, files=files))

    def open(self, executor: type[SegmentExecutor] = SegmentExecutor, **gpu: Any) -> tuple[Any, SimulatedGpu]:
        """An executor of it on a GPU with these settings, and the GPU."""
        device = SimulatedGpu(self.variants, self.plan, **gpu)
        return executor(self.artifact, device), device
