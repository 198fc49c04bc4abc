"""Engines of TensorRT and of TensorRT-RTX, whose runtimes have one interface: the library, and what runs an engine.

Written against the bindings of TensorRT 11.4 and TensorRT-RTX 1.7 and never run with either (docs/nvidia.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ArtifactError, PlancastError
from runtime.executors.segments.device import MIXED


@dataclass(frozen=True)
class Library:
    """What a backend's engines need.

    Attributes:
        title: as its maker calls it.
        modules: what to import; the first is the interface, the others load its libraries.
        extra: plancast's extra that installs it, with `note` on where pip gets it from.
        major: the version that is needed; "": the one that pip installs.
    """

    title: str
    modules: tuple[str, ...]
    extra: str
    note: str = ""
    major: str = ""


LIBRARIES = {
    "tensorrt": Library(
        "TensorRT", ("tensorrt",), "tensorrt", ", which fetches the library from NVIDIA's own package index", "11"
    ),
    "tensorrt_rtx": Library("TensorRT-RTX", ("tensorrt_rtx_bindings", "tensorrt_rtx_libs"), "rtx"),
}


def load_library(backend: str) -> Any:
    """The module of TensorRT or TensorRT-RTX. Raises `PlancastError` that says what was found and what to install."""
    library = LIBRARIES[backend]
    try:
        trt, *_ = [importlib.import_module(name) for name in library.modules]
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PlancastError(
            f"{library.title} does not load ({reason}): pip install 'plancast[{library.extra}]'{library.note}"
        ) from None
    if library.major and str(trt.__version__).partition(".")[0] != library.major:
        raise PlancastError(
            f"{library.title} {trt.__version__} is installed, and plancast works with {library.major}: "
            f"pip install '{library.modules[0]}=={library.major}.*'"
        )
    return trt


class Log:
    """A logger of either library, quiet; keeps the last error to explain a failure with."""

    def __init__(self, trt: Any):
        self.last = "no reason given"
        keep = self

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    keep.last = " ".join(message.split())

        self.logger = Logger()


class Engines:
    """A runtime of the library `trt`, which loads engines for the GPU `gpu` and enqueues them on `stream`."""

    def __init__(self, backend: str, trt: Any, gpu: str, stream: int):
        self._title, self._trt, self._gpu, self._stream = LIBRARIES[backend].title, trt, gpu, stream
        self._log = Log(trt)
        self._runtime = trt.Runtime(self._log.logger)

    def load(self, path: Path, free_memory: int) -> Engine:
        """The engine in `path`. Of one whose weights may stay in host memory, at most half of `free_memory` (bytes) is
        taken for weights: values and the KV cache want the rest.

        Raises:
            ArtifactError: it does not load here; with the library's own words.
        """
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise ArtifactError(
                f"{path}: {self._title} {self._trt.__version__} does not load the engine on {self._gpu} "
                f"({self._log.last}); too little memory, or built for another GPU or version"
            )
        if streamable := int(engine.streamable_weights_size):
            engine.weight_streaming_budget_v2 = min(streamable, free_memory // 2)
        return Engine(self._trt, engine, self._stream, f"{path.name}: {self._title}", self._log)


class Engine:
    """One engine. A captured graph needs a context of its own, so each kind of step has one.

    Of an engine with two profiles the first is for steps that decode, the last for the others.
    """

    def __init__(self, trt: Any, engine: Any, stream: int, name: str, log: Log):
        self._trt, self._engine, self._stream, self._name, self._log = trt, engine, stream, name, log
        self._contexts: dict[Hashable, Any] = {}

    def scratch_bytes(self) -> int:
        """Device memory that a run needs beside its tensors; with streamed weights, what those pass through too."""
        return int(self._engine.device_memory_size_v2)

    def enqueue(
        self, context: Hashable, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], scratch: int
    ) -> None:
        """See `device.LoadedSegment`. Raises `PlancastError` where the library refuses; with its own words."""
        made = self._contexts.get(context)
        if made is None:
            made = self._contexts[context] = self._context(context, scratch)
        for name, shape in shapes.items():
            if not made.set_input_shape(name, shape):
                raise PlancastError(f"{self._name} takes no {name} of shape {list(shape)}: {self._log.last}")
        for name, address in addresses.items():
            if not made.set_tensor_address(name, address):
                raise PlancastError(f"{self._name} takes no address of {name}: {self._log.last}")
        if not made.execute_async_v3(self._stream):
            raise PlancastError(f"{self._name} did not run the engine: {self._log.last}")

    def _context(self, context: Hashable, scratch: int) -> Any:
        made = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if made is None:
            raise PlancastError(f"{self._name} makes no execution context, too little device memory: {self._log.last}")
        if size := self.scratch_bytes():
            made.set_device_memory(scratch, size)
        last = int(self._engine.num_optimization_profiles) - 1
        # The only profile is chosen already.
        if last and not made.set_optimization_profile_async(last if context == MIXED else 0, self._stream):
            raise PlancastError(f"{self._name} does not take its profile for this step: {self._log.last}")
        return made
