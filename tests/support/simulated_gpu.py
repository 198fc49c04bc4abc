"""A GPU on the CPU, behind the executor's own interface: segments run on torch, kernels in Triton's interpreter; an
engine with plugins in it is loaded and driven by the executor's own code, from a simulated TensorRT.

Addresses are the host's own, launches get exactly the addresses and numbers that the driver would get, and captured
work runs when the graph is launched and not before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from simulated_trt import STREAM, SimulatedTrt

from plugins.torch_engine.engine import TorchEngine
from runtime.errors import PlancastError
from runtime.executors.segments.device import LoadedSegment
from runtime.executors.segments.engines import Engines
from runtime.executors.segments.plan import SIZES, SegmentPlan

_TORCH = {
    "*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32, "*i8": torch.int8, "*u8": torch.uint8,
    "*i32": torch.int32, "*i64": torch.int64,
}  # fmt: skip
_NUMPY = {"f16": np.float16, "f32": np.float32, "i32": np.int32, "i64": np.int64}


class SimulatedGpu:
    """`variants`: the kernels' sources by name; `plan` says what the segments' tensors are."""

    name = "simulated"
    architecture = "SM89"

    def __init__(self, variants: Mapping[str, Any], plan: SegmentPlan, memory: int = 1 << 30, multiprocessors: int = 4):
        self.variants, self.plan, self.memory, self.multiprocessors = variants, plan, memory, multiprocessors
        self.blocks: dict[int, np.ndarray] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.launched: list[str] = []
        self.replays = 0
        self.downloaded = 0  # bytes
        self.trt = SimulatedTrt(self)

    def free_memory(self) -> int:
        return self.memory - sum(block.size for block in self.blocks.values())

    def allocate(self, nbytes: int) -> int:
        raw = np.full(nbytes + 512, 0xFF, np.uint8)  # NaNs, so that a read of what nobody wrote shows
        begin = -raw.ctypes.data % 256
        raw[begin : begin + nbytes] = 0
        self.blocks[raw.ctypes.data + begin] = raw
        return raw.ctypes.data + begin

    def free(self, address: int) -> None:
        del self.blocks[address]

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def upload(self, address: int, source: NDArray[np.uint8]) -> None:
        assert self.recording is None, "a copy from changing host memory is captured"
        self.view(address, source.nbytes)[:] = source.reshape(-1)

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        self.downloaded += target.nbytes
        target[:] = self.view(address, target.nbytes)

    def synchronize(self) -> None:
        assert self.recording is None, "the driver does not synchronize while it captures"

    def load_kernel(self, name: str, kernel: Any, folder: Path) -> Any:
        return name, kernel

    def launch(self, handle: Any, grid: Sequence[int], arguments: Sequence[int]) -> None:
        name, kernel = handle
        self.do(lambda: self._run_kernel(name, kernel, tuple(grid), tuple(arguments)))

    def load_segment(self, path: Path) -> LoadedSegment:
        if path.suffix == ".plan":
            return Engines("tensorrt", self.trt, f"{self.name} ({self.architecture})", STREAM).load(
                path, self.free_memory()
            )
        return _Segment(self, path)

    def capture(self, work: Callable[[], None]) -> Any:
        self.recording = []
        try:
            work()
            recorded = self.recording
        finally:
            self.recording = None
        return _Graph(self, recorded)

    def close(self) -> None:
        assert not self.blocks, "device memory is left behind"

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Memory at `address`, which must lie in one allocation."""
        for base, block in self.blocks.items():
            if base <= address and address + nbytes <= base + block.size - 512 + 511:
                return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))
        raise PlancastError(f"{nbytes} bytes at {address:#x} are not allocated")

    def do(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    def _run_kernel(self, name: str, kernel: Any, grid: tuple[int, ...], arguments: tuple[int, ...]) -> None:
        variant = self.variants[name]
        self.launched.append(name)
        values = []
        for (_, kind), argument in zip(kernel.parameters, arguments, strict=True):
            if kind.startswith("*"):
                dtype = _TORCH[kind]
                values.append(torch.from_numpy(self.view(argument, 16)[:16]).view(dtype))
            else:
                values.append(argument)
        variant.kernel[grid](*values, **variant.constants, num_warps=variant.num_warps)


class _Graph:
    def __init__(self, gpu: SimulatedGpu, work: list[Callable[[], None]]):
        self.gpu, self.work = gpu, work

    def launch(self) -> None:
        self.gpu.replays += 1
        for step in self.work:
            step()


class _Segment:
    def __init__(self, gpu: SimulatedGpu, path: Path):
        self.gpu = gpu
        self.engine = TorchEngine(path, compute="f16")
        self.shapes: dict[Hashable, Any] = {}

    def scratch_bytes(self) -> int:
        return 0

    def enqueue(
        self, context: Hashable, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], scratch: int
    ) -> None:
        if isinstance(context, tuple):  # of a graph: always the same
            assert self.shapes.setdefault(context, dict(shapes)) == dict(shapes)
        addresses, shapes = dict(addresses), dict(shapes)
        self.gpu.do(lambda: self._run(addresses, shapes))

    def _run(self, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        values = self.gpu.plan.values
        feeds = {}
        for name, shape in shapes.items():
            dtype = values[name].dtype if name in values else "i64"
            data = self.gpu.view(addresses[name], int(np.prod(shape)) * SIZES[dtype])
            feeds[name] = data.view(_NUMPY[dtype]).reshape(shape)
        for name, array in self.engine.run_all(feeds).items():
            data = np.ascontiguousarray(array, _NUMPY[values[name].dtype]).reshape(-1).view(np.uint8)
            self.gpu.view(addresses[name], data.size)[:] = data
