"""What the executor asks of a GPU: memory, copies, kernels, engines and graphs on one stream.

Addresses are integers. Everything but `synchronize` returns at once and happens in the order that it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.executors.segments.plan import Kernel

MIXED = "mixed"  # the context of all steps that are no decode; their shapes differ


class LoadedSegment(Protocol):
    """One engine."""

    def scratch_bytes(self) -> int:
        """Device memory that a run needs beside its tensors."""
        ...

    def enqueue(
        self, context: Hashable, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], scratch: int
    ) -> None:
        """Run on tensors at `addresses`, inputs of `shapes`. Steps of one `context` have the same shapes each time, but
        for `MIXED` ones. Captured is none that did not run before.
        """
        ...


class Graph(Protocol):
    """Captured work."""

    def launch(self) -> None: ...


class Device(Protocol):
    """One GPU.

    Attributes:
        name: as its maker calls it.
        architecture: such as SM89.
        multiprocessors: how many run at once.
    """

    name: str
    architecture: str
    multiprocessors: int

    def free_memory(self) -> int:
        """Bytes that may still be allocated."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory. Raises `PlancastError` with the numbers where there is too little."""
        ...

    def free(self, address: int) -> None: ...

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, which copies to and from the device need to overlap with other work."""
        ...

    def upload(self, address: int, source: NDArray[np.uint8]) -> None: ...

    def download(self, target: NDArray[np.uint8], address: int) -> None: ...

    def synchronize(self) -> None:
        """Wait until everything that was asked for is done."""
        ...

    def load_kernel(self, name: str, kernel: Kernel, folder: Path) -> Any:
        """A handle for `launch`. Raises `ArtifactError` where the kernel was not compiled for this GPU."""
        ...

    def launch(self, handle: Any, grid: Sequence[int], arguments: Sequence[int]) -> None:
        """Launch with one argument for each of the kernel's parameters."""
        ...

    def load_segment(self, path: Path) -> LoadedSegment: ...

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """The launches that `work` asks for, which do not run now; None where they cannot be captured."""
        ...

    def close(self) -> None: ...
