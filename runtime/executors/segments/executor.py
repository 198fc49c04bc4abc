"""A `DeviceExecutor` over segments and kernels on one GPU stream. Decodes are captured as CUDA graphs, one a bucket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention.grids import copy_waves
from runtime.errors import ArtifactError, PlancastError
from runtime.executors.batch_checks import check_ids
from runtime.executors.sampling_blocks import (
    MAX_DRAFT_ENTRIES,
    MAX_TOP_LOGPROBS,
    given_block,
    pack_rows,
    read_rows,
    rows_left,
    told_block,
    told_bytes,
)
from runtime.executors.segments.calls import Call, Sizes, attention_calls, copy_call, kind_of
from runtime.executors.segments.device import MIXED
from runtime.executors.segments.memory import aligned, plan_arena
from runtime.executors.segments.plan import read_plan
from runtime.executors.segments.sampling import samples, sampling_calls, verifies
from runtime.executors.segments.step import (
    bucket_of,
    buckets,
    input_layout,
    input_lengths,
    is_decode,
    pack,
    pad_decode,
)
from runtime.kv_layout import KV_DTYPE_BITS
from runtime.manifest import rebuild_hint
from runtime.memory import format_size

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import RowSampling, SampledRows, StepBatch
    from runtime.executors.segments.device import Device, Graph
    from runtime.kv_layout import KvLayout

_MAX_COPIES = 256  # pairs of blocks a launch


class SegmentExecutor:
    """Owns everything that lies on the device: weights (in the engines), values, inputs, the KV pool.

    Attributes:
        load_source: always "segments".
        load_seconds: what loading took.
        graphs: captured decode steps by (bucket, kind of attention).
        max_top_logprobs, max_draft_entries: see `DeviceExecutor`.
    """

    load_source = "segments"

    def __init__(self, artifact: Artifact, device: Device):
        """Load every segment and kernel of `artifact` onto `device`.

        Raises:
            ArtifactError: built for other GPUs, or damaged; the message names both sides and the mend.
            PlancastError: too little device memory, with the numbers.
        """
        begin = time.perf_counter()
        manifest = artifact.manifest
        hint = rebuild_hint(manifest.name)
        check_architecture(artifact, device.architecture, device.name)
        self._device: Device | None = device
        self.plan = plan = read_plan(artifact.file(manifest.backend.engine), hint)
        self.kv_layout: KvLayout = manifest.kv
        logits = plan.values.get("logits")
        if logits is None or not isinstance(logits.shape[-1], int):
            raise ArtifactError(f"{artifact.path}: the last segment makes no logits of a fixed width; {hint}")
        self.vocab_size: int = logits.shape[-1]
        self._limits = limits = manifest.limits
        self._buckets = buckets(limits.max_num_seqs)
        self._segments = [device.load_segment(artifact.file(segment.file)) for segment in plan.segments]
        self._kernels = {name: device.load_kernel(name, kernel, artifact.path) for name, kernel in plan.kernels.items()}
        tokens = limits.max_num_batched_tokens
        self._max_blocks = -(-limits.max_context_len // self.kv_layout.block_size)  # a sequence
        self._inputs = input_layout(tokens, limits.max_num_seqs, self._max_blocks)
        arena = plan_arena(plan, tokens, tokens)
        sums, stats = (aligned(4 * count * tokens) for count in plan.split_elements)
        scratch = max(aligned(segment.scratch_bytes()) for segment in self._segments)
        pairs = aligned(8 * _MAX_COPIES)
        self.max_top_logprobs: int | None = MAX_TOP_LOGPROBS if samples(plan) else None
        self.max_draft_entries = MAX_DRAFT_ENTRIES if verifies(plan) else 0
        sampled = tokens if self.max_top_logprobs is not None else 0
        drafts = (tokens, MAX_DRAFT_ENTRIES) if self.max_draft_entries else ()
        given, told = given_block(sampled, *drafts).size, told_block(sampled).size
        self._memory: list[int] = []
        self._pool: list[int] = []
        regions = {"arena": arena.size, "partial": sums, "partial_stats": stats, "scratch": scratch}
        regions |= {"inputs": self._inputs.size, "pairs": pairs}
        regions |= {"given": aligned(given), "told": aligned(told)}
        base = self._allocate(sum(regions.values()), self._memory, "the values between segments")
        self._addresses: dict[str, int] = {}
        for name, size in regions.items():
            self._addresses[name] = base
            base += size
        self._addresses |= {name: self._addresses["arena"] + offset for name, offset in arena.offsets.items()}
        self._addresses |= {name: self._addresses["inputs"] + o for name, o in self._inputs.offsets.items()}
        self._staging = device.host(self._inputs.size)
        self._pairs = device.host(pairs)
        self._given, self._told = device.host(given), device.host(told)
        self._logits = device.host(4 * tokens * self.vocab_size)
        self.graphs: dict[tuple[int, str], Graph | None] = {}
        self._num_blocks = 0
        self._groups: list[_Group] = []
        self._asked: tuple[int, RowSampling | None] = (0, None)  # of the step that runs: its rows
        self.load_seconds = time.perf_counter() - begin

    # Memory -------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks allocated so far (0 before `allocate`); one more is there for padding."""
        return self._num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache on the device, in place of what an earlier call allocated.

        Raises:
            PlancastError: fewer than one block, or more than the device's free memory or the engine's caches hold; with
                the numbers.
        """
        device = self._open()
        if num_blocks < 1:
            raise PlancastError(f"a KV cache needs at least one block, not {num_blocks}")
        most = self.plan.max_blocks
        if most and num_blocks >= most:
            raise PlancastError(
                f"a KV cache of {num_blocks} blocks is more than the engine takes, which is {most - 1}; ask for less "
                "(--kv-cache-memory)"
            )
        self._free_pool()
        block = self.kv_layout.bytes_per_block
        needed, free = (num_blocks + 1) * block, device.free_memory()
        if needed > free:
            raise PlancastError(
                f"a KV cache of {num_blocks} blocks takes {format_size(needed)}, and {format_size(free)} are free on "
                f"{device.name}. Ask for less (--kv-cache-memory), or free memory"
            )
        sizes: dict[str, int] = {}
        for layer, cells in zip(self.plan.layers, self.kv_layout.layers, strict=True):
            for part, size, dtype, scale in (
                ("key", cells.key_head_size, cells.key_dtype, cells.key_scale_bytes),
                ("value", cells.value_head_size, cells.value_dtype, cells.value_scale_bytes),
            ):
                cell = size * KV_DTYPE_BITS[dtype] // 8 + scale
                sizes[f"{part}_cache.{layer}"] = cell * cells.num_kv_heads * self.kv_layout.block_size
        # Caches whose blocks have one size lie side by side, so that one launch copies a block of them all.
        for size in sorted(set(sizes.values())):
            names = [name for name, other in sizes.items() if other == size]
            base = self._allocate(aligned((num_blocks + 1) * size) * len(names), self._pool, "the KV cache")
            stride = aligned((num_blocks + 1) * size)
            bases = [base + i * stride for i in range(len(names))]
            self._addresses |= dict(zip(names, bases, strict=True))
            table = self._allocate(aligned(8 * len(names)), self._pool, "the KV cache")
            device.upload(table, np.asarray(bases, np.int64).view(np.uint8))
            self._groups.append(_Group(size, tuple(bases), table))
        device.synchronize()
        self._num_blocks = num_blocks

    def read_block(self, block_id: int) -> bytes:
        """The block's cells of every layer, as `write_block` takes them back."""
        device = self._allocated(block_id)
        data = np.empty(self.kv_layout.bytes_per_block, np.uint8)
        for offset, size, address in self._runs(block_id):
            device.download(data[offset : offset + size], address)
        device.synchronize()
        return data.tobytes()

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned, into any block. Raises `ValueError` where `data` has another length."""
        device = self._allocated(block_id)
        if len(data) != self.kv_layout.bytes_per_block:
            raise ValueError(f"a block has {self.kv_layout.bytes_per_block} bytes, and {len(data)} were given")
        source = np.frombuffer(data, np.uint8)
        for offset, size, address in self._runs(block_id):
            device.upload(address, source[offset : offset + size])
        device.synchronize()

    def close(self) -> None:
        """Free everything on the device. Idempotent."""
        device, self._device = self._device, None
        if device is not None:
            with contextlib.suppress(PlancastError):
                device.synchronize()  # a step may still run
            self.graphs.clear()
            self._segments, self._kernels = [], {}
            for address in (*self._pool, *self._memory):
                device.free(address)
            device.close()

    # Running ------------------------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step; see `Executor.run`. The logits are page-locked memory, overwritten by the next step.

        Raises:
            PlancastError: nothing is allocated.
            ValueError: a block or token id out of range, or a step larger than the engine was built for.
        """
        self.launch(batch)
        return self.collect()[0]

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        """Ask for one step, and for sampling its rows; see `DeviceExecutor`. Raises what `run` raises."""
        device = self._allocated()
        check_ids(batch, self._num_blocks, self.vocab_size)
        rows = len(batch.logits_rows)
        self._copy_blocks(device, batch.copies)
        if is_decode(batch):
            self._decode(device, batch)
        else:
            self._upload(device, batch)
            # Engines take one row at least: of a chunk that wants no logits, those of some row are computed.
            self._step(device, self._sizes(batch), max(1, rows), MIXED)
        if not rows or self.max_top_logprobs is None:
            sampling = None
        self._asked = rows, sampling
        if sampling is None:
            self._fetch(device, np.arange(rows))
            return
        block = pack_rows(sampling, self._given)
        logits, given, told = (self._addresses[name] for name in ("logits", "given", "told"))
        device.upload(given, self._given[: block.size])
        for call in sampling_calls(self.plan, sampling, block, logits, given, told, self.vocab_size):
            self._launch(device, call)
        device.download(self._told[: told_bytes(sampling)], told)
        self._fetch(device, np.flatnonzero(sampling.temperatures < 0))

    def collect(self) -> tuple[NDArray[np.float32], SampledRows | None]:
        """What the step brought; see `DeviceExecutor`. Logits as `run` gives them."""
        device = self._allocated()
        rows, sampling = self._asked
        device.synchronize()
        sampled = None
        if sampling is not None:
            sampled = read_rows(sampling, self._told)
            left = rows_left(sampling, sampled)
            if left.size:
                self._fetch(device, left)
                device.synchronize()
        return self._logits[: 4 * rows * self.vocab_size].view(np.float32).reshape(rows, self.vocab_size), sampled

    def _fetch(self, device: Device, rows: NDArray[np.int64]) -> None:
        """Ask for the logits of these rows, ascending, one copy for each run of them."""
        width = 4 * self.vocab_size
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if run.size:
                begin, end = int(run[0]) * width, (int(run[-1]) + 1) * width
                device.download(self._logits[begin:end], self._addresses["logits"] + begin)

    def _decode(self, device: Device, batch: StepBatch) -> None:
        """A decode step: the graph of its bucket, captured when the bucket is met the second time."""
        size = bucket_of(len(batch.past_lens), self._buckets)
        padded = pad_decode(batch, size, self._num_blocks)
        sizes = self._sizes(padded)
        kind = kind_of(self.plan, self.plan.attentions[0], sizes) if self.plan.attentions else "whole"
        self._upload(device, padded)
        key = (size, kind)
        if key not in self.graphs:
            # The first run is not captured: engines prepare themselves for new shapes outside of one.
            self._step(device, sizes, size, key)
            device.synchronize()
            self.graphs[key] = device.capture(lambda: self._step(device, sizes, size, key))
            return
        graph = self.graphs[key]
        if graph is None:
            self._step(device, sizes, size, key)
        else:
            graph.launch()

    def _step(self, device: Device, sizes: Sizes, rows: int, context: Any) -> None:
        """Ask for every segment and kernel of a step, whose inputs lie on the device."""
        plan, addresses = self.plan, self._addresses
        kind = context[1] if isinstance(context, tuple) else None
        shapes = {name: value.dims(sizes.tokens, rows) for name, value in plan.values.items()}
        lengths = input_lengths(sizes.tokens, sizes.sequences, rows, self._max_blocks)
        shapes |= {name: (length,) for name, length in lengths.items()}
        shapes |= {name: (self._num_blocks + 1, *block) for name, block in plan.caches.items()}
        for i, (info, segment) in enumerate(zip(plan.segments, self._segments, strict=True)):
            names = (*info.inputs, *info.outputs)
            given = {name: shapes[name] for name in info.inputs}
            segment.enqueue(context, {name: addresses[name] for name in names}, given, addresses["scratch"])
            for layer in plan.attentions[i : i + 1]:
                chosen = kind or kind_of(plan, layer, sizes)
                for call in attention_calls(plan, layer, chosen, sizes, addresses.__getitem__):
                    self._launch(device, call)

    def _launch(self, device: Device, call: Call) -> None:
        device.launch(self._kernels[call.kernel], call.grid, call.arguments)

    def _sizes(self, batch: StepBatch) -> Sizes:
        count = self._open().multiprocessors
        return Sizes(len(batch.token_ids), len(batch.past_lens), int(batch.max_context_len), count)

    def _upload(self, device: Device, batch: StepBatch) -> None:
        size = pack(batch, self._inputs, self._staging)
        device.upload(self._addresses["inputs"], self._staging[:size])

    def _copy_blocks(self, device: Device, copies: Sequence[tuple[int, int]]) -> None:
        for wave in copy_waves(copies):
            for start in range(0, len(wave), _MAX_COPIES):
                pairs = np.asarray(wave[start : start + _MAX_COPIES], np.int32)
                device.synchronize()  # the table before is read
                self._pairs[: pairs.nbytes] = pairs.reshape(-1).view(np.uint8)
                device.upload(self._addresses["pairs"], self._pairs[: pairs.nbytes])
                for group in self._groups:
                    bases = group.table, len(group.bases)
                    self._launch(
                        device, copy_call(self.plan, *bases, self._addresses["pairs"], len(pairs), group.block_bytes)
                    )

    # Checks -------------------------------------------------------------------------------------------------------

    def _runs(self, block_id: int) -> list[tuple[int, int, int]]:
        """The block's runs of bytes: offset in a swapped block, bytes, address."""
        runs, offset = [], 0
        for group in self._groups:
            for base in group.bases:
                runs.append((offset, group.block_bytes, base + block_id * group.block_bytes))
                offset += group.block_bytes
        return runs

    def _allocate(self, nbytes: int, owner: list[int], what: str) -> int:
        device = self._open()
        free = device.free_memory()
        if nbytes > free:
            raise PlancastError(
                f"{what} take {format_size(nbytes)}, and {format_size(free)} are free on {device.name}; free memory, "
                "or build with smaller limits"
            )
        owner.append(device.allocate(nbytes))
        return owner[-1]

    def _free_pool(self) -> None:
        # Graphs hold the addresses of the pool.
        self.graphs.clear()
        for address in self._pool:
            with contextlib.suppress(PlancastError):
                self._open().free(address)
        self._pool.clear()
        self._groups.clear()
        self._num_blocks = 0

    def _open(self) -> Device:
        if self._device is None:
            raise PlancastError("the executor is closed")
        return self._device

    def _allocated(self, block_id: int = 0) -> Device:
        device = self._open()
        if not self._num_blocks:
            raise PlancastError("the executor has no KV cache: call allocate first")
        if not 0 <= block_id < self._num_blocks:
            raise ValueError(f"block ids must lie in 0..{self._num_blocks - 1}, not {block_id}")
        return device


class _Group:
    """Caches whose blocks have one size. `table`: the device's copy of `bases`."""

    def __init__(self, block_bytes: int, bases: tuple[int, ...], table: int):
        self.block_bytes, self.bases, self.table = block_bytes, bases, table


def check_architecture(artifact: Artifact, architecture: str, name: str) -> None:
    """Raise `ArtifactError` unless the engines were built for the GPU `name` of `architecture`."""
    built = artifact.manifest.backend.properties.get("compute_capabilities", "").split()
    if architecture not in built:
        raise ArtifactError(
            f"{artifact.path}: built for {', '.join(built)}, and this GPU ({name}) is {architecture}; "
            f"{rebuild_hint(artifact.manifest.name)} --set backend.compute_capabilities=[{architecture}]"
        )
