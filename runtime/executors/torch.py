"""Runs a graph on torch, by the engine in `plugins/torch_engine`: torch itself is imported there and nowhere here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ArtifactError, PlancastError
from runtime.executors.batch_checks import check_ids
from runtime.executors.manifest_checks import check_block
from runtime.executors.sampling_blocks import (
    MAX_DRAFT_ENTRIES,
    MAX_TOP_LOGPROBS,
    given_block,
    kernel_variants,
    launches,
    pack_rows,
    read_rows,
    rows_left,
    told_block,
    told_bytes,
)
from runtime.executors.segments.step import bucket_of, buckets, is_decode, pad_decode
from runtime.manifest import rebuild_hint
from runtime.memory import available_memory, format_size

if TYPE_CHECKING:
    from plugins.torch_engine.engine import TorchEngine
    from plugins.torch_engine.graphs import Capture, DecodeGraphs, Tensor
    from runtime.artifact import Artifact
    from runtime.executor import RowSampling, SampledRows, StepBatch
    from runtime.kv_layout import KvLayout


class TorchExecutor:
    """An `Executor` over a torch engine, on the device that the artifact was built for.

    On a GPU, decode steps are padded to a bucket of sequences and run by CUDA graphs: `plugins/torch_engine/graphs.py`.

    Attributes:
        load_source: always "graph": there is no compiled form.
        load_seconds: what loading took.
        graphs: what runs decode steps, once blocks are allocated; None: they run operator by operator, as all others.
    """

    load_source = "graph"

    def __init__(self, artifact: Artifact, num_threads: int | None = None, capture: Capture | None = None):
        """Load the engine of `artifact`.

        Args:
            num_threads: default: the manifest's, else torch's choice.
            capture: what captures decode steps (default: CUDA graphs on a GPU, nothing on a CPU).

        Raises:
            ArtifactError: torch, onnx-ir or the device is missing, or the graph does not load.
        """
        begin = time.perf_counter()
        manifest = artifact.manifest
        hint = rebuild_hint(manifest.name)
        try:
            from plugins.torch_engine import device
            from plugins.torch_engine.engine import TorchEngine
            from plugins.torch_engine.graphs import CudaCapture
        except ImportError as error:
            raise ArtifactError(
                f"{artifact.path}: its backend is torch, and {error.name} is not installed; pip install "
                "'plancast[build]' (and 'plancast[triton]' for a GPU)"
            ) from None
        properties = manifest.backend.properties
        missing = device.missing(manifest.backend.device)
        if missing:
            raise ArtifactError(f"{artifact.path}: built for {manifest.backend.device}, and {missing}; {hint}")
        device.set_threads(num_threads or manifest.defaults.num_threads)
        try:
            self._engine: TorchEngine | None = TorchEngine(
                artifact.file(manifest.backend.engine),
                compute=properties["compute"],
                device=manifest.backend.device.lower(),
                kernels=properties["kernels"],
            )
        except (ValueError, KeyError) as error:
            raise ArtifactError(f"{artifact.path}: the graph does not load ({error}); {hint}") from error
        self._capture = capture or (CudaCapture() if self._engine.device.type == "cuda" else None)
        self.graphs: DecodeGraphs | None = None
        self._buckets = buckets(manifest.limits.max_num_seqs)
        self._max_blocks = -(-manifest.limits.max_context_len // manifest.kv.block_size)
        self.kv_layout: KvLayout = manifest.kv
        self.vocab_size: int = self._engine.vocab_size
        check_block(artifact, self.kv_layout, sum(self._engine.block_bytes))
        self.load_seconds = time.perf_counter() - begin

    @property
    def num_blocks(self) -> int:
        """Blocks allocated so far (0 before `allocate`); where steps are padded, one more is there for padding."""
        return self._engine.num_blocks - self._spare if self._engine and self._engine.num_blocks else 0

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache, in place of what an earlier call allocated.

        Raises:
            PlancastError: fewer than one block, or more than the device's free memory holds; with the numbers.
        """
        engine = self._open()
        if num_blocks < 1:
            raise PlancastError(f"a KV cache needs at least one block, not {num_blocks}")
        needed = (num_blocks + self._spare) * self.kv_layout.bytes_per_block
        on_device = engine.free_memory()
        host = available_memory()
        free, where = (host.bytes, host.limited_by) if on_device is None else (on_device, str(engine.device))
        if needed > free:
            raise PlancastError(
                f"a KV cache of {num_blocks} blocks takes {format_size(needed)}, and {format_size(free)} are "
                f"free ({where}). Ask for less (--kv-cache-memory), or free memory"
            )
        self.graphs = None  # those there are hold the addresses of the old cache
        engine.allocate(num_blocks + self._spare)
        if self._capture is not None:
            from plugins.torch_engine.graphs import DecodeGraphs

            self.graphs = DecodeGraphs(engine, self._capture, self._max_blocks)

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step; see `Executor.run`.

        Raises:
            PlancastError: nothing is allocated.
            ValueError: a block or token id out of range, which a device would not notice before it reads elsewhere.
        """
        return self._compute(batch).float().cpu().numpy()

    def _compute(self, batch: StepBatch) -> Tensor:
        """The logits of a step [R, vocab_size], on the device, which may still compute them. Raises what `run` does."""
        engine = self._allocated()
        check_ids(batch, self.num_blocks, self.vocab_size)
        if batch.copies:
            engine.copy_blocks(batch.copies)
        count = len(batch.past_lens)
        if self.graphs is None or not is_decode(batch) or count > self._buckets[-1]:
            return engine.compute(_feeds(batch))[engine.output_names[0]]
        padded = pad_decode(batch, bucket_of(count, self._buckets), self.num_blocks)
        return self.graphs.run(_feeds(padded))[:count]

    def read_block(self, block_id: int) -> bytes:
        """The block's cells of every layer, as `write_block` takes them back."""
        return self._allocated(block_id).read_block(block_id)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned, into any block. Raises `ValueError` where `data` has another length."""
        self._allocated(block_id).write_block(block_id, data)

    def close(self) -> None:
        """Free the engine and the cache. Idempotent."""
        self._engine = self.graphs = None

    @property
    def _spare(self) -> int:
        return 0 if self._capture is None else 1

    def _open(self) -> TorchEngine:
        if self._engine is None:
            raise PlancastError("the executor is closed")
        return self._engine

    def _allocated(self, block_id: int = 0) -> TorchEngine:
        engine = self._open()
        if not engine.num_blocks:
            raise PlancastError("the executor has no KV cache: call allocate first")
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}, not {block_id}")
        return engine


class TorchDeviceExecutor(TorchExecutor):
    """The same as a `DeviceExecutor`: steps run beside the host, and the Triton kernels sample their rows.

    For a GPU. On a CPU, where the kernels are interpreted (TRITON_INTERPRET=1), a launch returns when its step is done.
    """

    def __init__(self, artifact: Artifact, num_threads: int | None = None, capture: Capture | None = None):
        """See `TorchExecutor`; triton missing is an `ArtifactError`, too."""
        super().__init__(artifact, num_threads, capture)
        try:
            from plugins.torch_engine.sampling import SamplingKernels

            variants = kernel_variants()
        except ImportError as error:
            raise ArtifactError(
                f"{artifact.path}: it samples by Triton kernels, and {error.name} is not installed; pip install "
                "'plancast[triton]'"
            ) from None
        self.max_top_logprobs: int | None = MAX_TOP_LOGPROBS
        self.max_draft_entries = MAX_DRAFT_ENTRIES
        rows = artifact.manifest.limits.max_num_batched_tokens
        most = given_block(rows, rows, MAX_DRAFT_ENTRIES).size, told_block(rows).size
        self._kernels: SamplingKernels | None = SamplingKernels(self._open().device, variants, *most)
        self._flight: tuple[Tensor, RowSampling | None] | None = None

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        """Begin a step; see `DeviceExecutor`. Raises what `run` raises."""
        logits = self._compute(batch)
        if not len(batch.logits_rows):
            sampling = None
        self._flight = logits, sampling
        if sampling is None:
            return
        assert self._kernels is not None, "an executor that is open"
        given, told = pack_rows(sampling, self._kernels.given), told_block(len(logits))
        numbers = {"size": self.vocab_size, "width": MAX_TOP_LOGPROBS}
        sizes = given.size, told_bytes(sampling)
        self._kernels.launch(logits, given.arrays, told.arrays, launches(sampling), numbers, sizes)

    def collect(self) -> tuple[NDArray[np.float32], SampledRows | None]:
        """What the step brought; see `DeviceExecutor`."""
        assert self._flight is not None, "a step was launched"
        (logits, sampling), self._flight = self._flight, None
        if sampling is None:
            return logits.float().cpu().numpy(), None
        from plugins.torch_engine.sampling import fetch_rows

        assert self._kernels is not None, "an executor that is open"
        self._kernels.wait()
        sampled = read_rows(sampling, self._kernels.told)
        fetched = np.empty((len(logits), self.vocab_size), np.float32)
        hosted = np.flatnonzero(sampling.temperatures < 0)
        fetch_rows(logits, np.union1d(hosted, rows_left(sampling, sampled)), fetched)
        return fetched, sampled

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step and wait for it; see `Executor.run`. Raises what `TorchExecutor.run` does."""
        self.launch(batch)
        return self.collect()[0]

    def close(self) -> None:
        """Free the engine, the cache and the buffers. Idempotent."""
        self._kernels = self._flight = None
        super().close()


def _feeds(batch: StepBatch) -> dict[str, NDArray]:
    """The inputs of the graph, by name."""
    return {
        "input_ids": np.asarray(batch.token_ids, np.int64),
        "position_ids": np.asarray(batch.positions, np.int64),
        "past_lens": np.asarray(batch.past_lens, np.int32),
        "query_starts": np.asarray(batch.query_starts, np.int32),
        "block_ids": np.asarray(batch.block_ids, np.int32),
        "block_starts": np.asarray(batch.block_starts, np.int32),
        "max_context_len": np.array(batch.max_context_len, np.int32),
        "logits_rows": np.asarray(batch.logits_rows, np.int64),
    }
