"""What drafts are trained in: bf16 where the CPU multiplies it natively, f32 where it would have to emulate it."""

from __future__ import annotations

import functools

import torch

from runtime.hardware import this_machine

# Without one of these a product in bf16 takes several times what it takes in f32.
_NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}


@functools.cache
def training_dtype() -> torch.dtype:
    """Of the products in training."""
    return torch.bfloat16 if _NATIVE & set(this_machine().isa) else torch.float32


def half_where_fast() -> torch.autocast:
    """A context in which products are of `training_dtype`."""
    return torch.autocast("cpu", torch.bfloat16, enabled=training_dtype() is torch.bfloat16)
