"""The sampling kernels over a step's logits on a torch device: one copy up, one small copy down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from plugins.gpu.aot import Variant

# Arrays in a block of bytes: name -> offset, type, shape.
Arrays = Mapping[str, "tuple[int, DTypeLike, tuple[int, ...]]"]


class SamplingKernels:
    """Launches kernels whose arguments lie in two blocks of bytes, on the host and on the device.

    Attributes:
        given: u8, what goes up: to be filled before `launch`.
        told: u8, what came down, once the device is done.
    """

    def __init__(self, device: torch.device, variants: Mapping[str, Variant], given_bytes: int, told_bytes: int):
        """`variants`: the kernels by name. The sizes: of the largest step."""
        self._variants, self._device = variants, device
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(n, dtype=torch.uint8, pin_memory=pinned) for n in (given_bytes, told_bytes)]
        self._devices = [torch.zeros(n, dtype=torch.uint8, device=device) for n in (given_bytes, told_bytes)]
        self.given: NDArray[np.uint8] = self._hosts[0].numpy()
        self.told: NDArray[np.uint8] = self._hosts[1].numpy()

    @torch.inference_mode()
    def launch(
        self, logits: Tensor, given: Arrays, told: Arrays, launches: Iterable[tuple[str, int]], numbers: dict[str, int],
        sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        """Copy up, launch (name, programs) one after another, and copy down; returns before that is done.

        Args:
            logits: [R, V] on the device, contiguous.
            given, told: where the kernels' arrays lie.
            numbers: arguments that are no arrays.
            sizes: bytes that go up, and that come down.
        """
        (given_host, told_host), (given_device, told_device) = self._hosts, self._devices
        up, down = sizes
        given_device[:up].copy_(given_host[:up], non_blocking=True)
        values: dict[str, Any] = {"logits": logits, **numbers}
        for memory, arrays in ((given_device, given), (told_device, told)):
            for name, (offset, dtype, shape) in arrays.items():
                kind = np.dtype(dtype)
                data = memory[offset : offset + kind.itemsize * int(np.prod(shape))]
                values[name] = data.view(getattr(torch, kind.name)).view(shape)
        for name, programs in launches:
            variant = self._variants[name]
            taken = {n: values[n] for n in variant.kernel.arg_names if n not in variant.constants}
            variant.kernel[(programs,)](**taken, **variant.constants, num_warps=variant.num_warps)
        told_host[:down].copy_(told_device[:down], non_blocking=True)

    def wait(self) -> None:
        """Until the device is done, and `told` is there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@torch.inference_mode()
def fetch_rows(logits: Tensor, rows: NDArray[np.int64], target: NDArray[np.float32]) -> None:
    """Copy these rows of `logits` [R, V] to the same places of `target` f32 [R, V]."""
    if len(rows):
        index = torch.from_numpy(rows).to(logits.device)
        target[rows] = logits.index_select(0, index).float().cpu().numpy()
