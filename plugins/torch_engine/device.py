"""The devices that a torch engine runs on."""

from __future__ import annotations

import torch

DEVICES = ("CPU", "CUDA")


def missing(device: str) -> str | None:
    """Why `device` (one of `DEVICES`) cannot be used here; None where it can."""
    if device == "CPU":
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA: install one with it"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU with a working driver (nvidia-smi tells more)"
    return None


def set_threads(count: int | None) -> None:
    """How many threads torch computes with on the CPU (None: as it is)."""
    if count is not None:
        torch.set_num_threads(count)
