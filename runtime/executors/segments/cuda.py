"""The GPU: NVIDIA's driver by cuda-python, which is imported when a device is opened; and the engines' library with it.

Written against the driver API of CUDA 13 and not run on a GPU yet (docs/nvidia.md).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ArtifactError, PlancastError
from runtime.executors.segments.engines import LIBRARIES, Engine, Engines, load_library
from runtime.executors.segments.plan import Kernel
from runtime.memory import format_size

_STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking


class CudaDevice:
    """GPU number `index`, for engines of `backend`; see `device.Device`."""

    def __init__(self, index: int = 0, backend: str = "tensorrt_rtx"):
        """Raises `PlancastError` in one line: no cuda-python, no driver, no such GPU, no library of the backend."""
        self._driver = driver = load_driver(LIBRARIES[backend].extra)
        trt = load_library(backend)
        count = self._call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise PlancastError(
                f"GPU {index} does not exist: the driver has {count} (CUDA_VISIBLE_DEVICES hides others)"
            )
        device = self._call("cuDeviceGet", index)
        self._device = device
        # The primary context is the one that TensorRT's runtime uses, too.
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", device))
        attribute = driver.CUdevice_attribute
        self.name: str = bytes(self._call("cuDeviceGetName", 128, device)).partition(b"\0")[0].decode()
        major, minor = (
            self._call(
                "cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device
            )
            for part in ("MAJOR", "MINOR")
        )
        self.architecture = f"SM{10 * major + minor}"
        self.multiprocessors: int = self._call(
            "cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device
        )
        self._stream = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._engines = Engines(backend, trt, f"{self.name} ({self.architecture})", int(self._stream))
        self._hosts: list[int] = []
        self._modules: list[Any] = []

    def free_memory(self) -> int:
        free, _total = self._call("cuMemGetInfo")
        return free

    def allocate(self, nbytes: int) -> int:
        try:
            address = int(self._call("cuMemAlloc", max(1, nbytes)))
        except PlancastError as error:
            raise PlancastError(
                f"{self.name} has no {format_size(nbytes)} left ({format_size(self.free_memory())} are free): {error}"
            ) from None
        self._call("cuMemsetD8Async", address, 0, max(1, nbytes), self._stream)
        return address

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        address = int(self._call("cuMemHostAlloc", max(1, nbytes), 0))
        self._hosts.append(address)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))

    def upload(self, address: int, source: NDArray[np.uint8]) -> None:
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self._stream)

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self._stream)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def load_kernel(self, name: str, kernel: Kernel, folder: Path) -> _Loaded:
        image = kernel.images.get(self.architecture)
        if image is None:
            raise ArtifactError(
                f"{folder}: the kernel {name} was compiled for {', '.join(kernel.images) or 'no GPU'}, and "
                f"{self.name} is {self.architecture}"
            )
        module = self._call("cuModuleLoadData", (folder / image.file).read_bytes() + b"\0")
        self._modules.append(module)
        function = self._call("cuModuleGetFunction", module, image.entry.encode())
        if image.shared > _STATIC_SHARED:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, image.shared)
        return _Loaded(function, kernel, image.shared)

    def launch(self, handle: _Loaded, grid: Sequence[int], arguments: Sequence[int]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        packed, pointers = pack_arguments(handle.kernel, arguments)
        self._call(
            "cuLaunchKernel", handle.function, x, y, z, 32 * handle.kernel.num_warps, 1, 1, handle.shared, self._stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        del packed  # the driver has copied them

    def load_segment(self, path: Path) -> Engine:
        return self._engines.load(path, self.free_memory())

    def capture(self, work: Callable[[], None]) -> _CudaGraph | None:
        driver = self._driver
        self._call("cuStreamBeginCapture", self._stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            work()
        except PlancastError:
            work_failed = True
        else:
            work_failed = False
        error, graph = driver.cuStreamEndCapture(self._stream)
        if work_failed or error != driver.CUresult.CUDA_SUCCESS:
            return None  # an engine that cannot be captured runs launch by launch
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        return _CudaGraph(self, executable)

    def close(self) -> None:
        for module in self._modules:
            self._call("cuModuleUnload", module)
        for address in self._hosts:
            self._call("cuMemFreeHost", address)
        self._modules.clear()
        self._hosts.clear()
        self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._driver, name, *arguments)


class _CudaGraph:
    def __init__(self, device: CudaDevice, executable: Any):
        self._device, self._executable = device, executable

    def launch(self) -> None:
        self._device._call("cuGraphLaunch", self._executable, self._device._stream)

    def __del__(self) -> None:
        with contextlib.suppress(PlancastError):
            self._device._call("cuGraphExecDestroy", self._executable)


class _Loaded:
    def __init__(self, function: Any, kernel: Kernel, shared: int):
        self.function, self.kernel, self.shared = function, kernel, shared


def pack_arguments(kernel: Kernel, arguments: Sequence[int]) -> tuple[Any, Any]:
    """Arguments as the driver takes them: values of 8 (pointers) or 4 bytes, and an array of their addresses.

    Raises:
        ValueError: not one argument for each parameter, or a number that does not fit.
    """
    if len(arguments) != len(kernel.parameters):
        raise ValueError(
            f"the kernel has {len(kernel.parameters)} parameters, and {len(arguments)} arguments were given"
        )
    values = []
    for (name, kind), argument in zip(kernel.parameters, arguments, strict=True):
        if kind.startswith("*"):
            values.append(ctypes.c_uint64(argument))
        elif -(2**31) <= argument < 2**31:
            values.append(ctypes.c_int32(argument))
        else:
            raise ValueError(f"{name} is {argument}, which 32 bits do not hold")
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    return values, pointers


def load_driver(extra: str = "rtx") -> Any:
    """The driver's bindings, initialized. Raises `PlancastError` that says what is missing, and plancast's `extra` that
    brings it.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise PlancastError(
            f"NVIDIA engines run by cuda-python, which is not installed: pip install 'plancast[{extra}]'"
        ) from None
    try:
        call(driver, "cuInit", 0)
    except RuntimeError as error:  # the library does not load
        raise PlancastError(
            f"no NVIDIA driver here ({str(error).splitlines()[0].rstrip('.')}): install one, or serve an "
            "artifact for a CPU; plancast doctor shows what there is"
        ) from None
    return driver


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver: its one result, a tuple of several, or None. Raises `PlancastError` on failure."""
    code, *results = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(code)
        said = text.decode() if isinstance(text, bytes) else str(code)
        raise PlancastError(f"the NVIDIA driver failed in {name}: {said}")
    return results[0] if len(results) == 1 else tuple(results) or None
