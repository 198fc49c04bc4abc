"""Launches the small Triton kernels on torch tensors: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import torch
import triton

from plugins.gated_mlp.kernel import gated
from plugins.norm.kernel import rms_norm as norm_kernel
from plugins.rope.kernel import rope as rope_kernel
from plugins.weight_only.kernel import matmul, sum_splits

_DEFAULT_BLOCK_K = 128


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None = None,
    *,
    summed: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS normalization of the rows of `x` [T, width]; with `residual` [T, width], of the sum, which goes to `summed`
    (default: in the residual's place)."""
    y = torch.empty_like(x)
    if len(x):
        width = x.shape[1]
        norm_kernel[(len(x),)](
            x, x if residual is None else residual, weight, y, x if residual is None else residual if summed is None
            else summed, EPSILON=epsilon, WIDTH=width,
            RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
    return y


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_heads: int,
    rotary: int | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotary embedding of `x` [T, num_heads * size] by `cos` and `sin` [positions, rotary / 2]."""
    y = torch.empty_like(x)
    if len(x):
        size = x.shape[1] // num_heads
        rope_kernel[(len(x), num_heads)](
            x, cos, sin, positions, y, SIZE=size, ROTARY=size if rotary is None else rotary, INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip
    return y


def gated_mlp(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`activation(gate) * up` of `gate_up` [T, 2 * width]; activation silu or gelu_tanh."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is unknown; silu or gelu_tanh")
    width = gate_up.shape[1] // 2
    y = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        block = min(1024, triton.next_power_of_2(width))
        gated[(len(gate_up), triton.cdiv(width, block))](gate_up, y, width, ACTIVATION=activation, BLOCK=block)
    return y


def weight_only(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    kind: str,
    *,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    splits: int | None = None,
    block_n: int = 64,
) -> torch.Tensor:
    """`x W^T (+ bias)` [M, N] in the dtype of `x` [M, K].

    Args:
        weight: [N, K] i8, or u8 (fp8 bits); int4 and uint4: u8 [N, K / 2], element 2 j in the low nibble of byte j.
        scales: [N], or [N, K / group] with a group of 16 or more columns, a power of two.
        kind: int4, uint4, int8, fp8_e4m3, fp8_e5m2 (or with `_native`, see `plugins.gpu.kernel_numbers`).
        zeros: i8, as scales: what is taken off int4 codes; only with groups.
        splits: of K (default: enough to fill the device).

    Raises:
        ValueError: shapes that do not fit together.
    """
    (M, K), N = x.shape, weight.shape[0]
    if weight.shape[1] * (2 if kind.endswith("int4") else 1) != K:
        raise ValueError(f"x has {K} columns, and the {kind} weight has the shape {tuple(weight.shape)}")
    group = K // scales.shape[1] if scales.ndim == 2 else 0
    if group and (group < 16 or group & (group - 1) or K % group):
        raise ValueError(f"groups of {group} of {K} columns: a group must be a power of two from 16 that divides them")
    if zeros is not None and not (group and kind.endswith("int4")):
        raise ValueError("zeros go with int4 weights in groups")
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not M:
        return y
    block_m = min(64, max(16, triton.next_power_of_2(M)))
    block_k = min(_DEFAULT_BLOCK_K, group or _DEFAULT_BLOCK_K)
    if kind.endswith("int4"):
        block_k = max(block_k, 32)  # a product takes 16 columns or more, and these are halves
        if group == 16:
            raise ValueError("int4 weights need groups of 32 columns or more")
    columns, rows = triton.cdiv(N, block_n), triton.cdiv(M, block_m)
    if splits is None:
        count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        splits = max(1, min(8, 2 * count // (columns * rows), K // (4 * block_k)))
    out = y if splits == 1 else torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    unused = scales
    matmul[(columns, rows, splits)](
        x, weight, scales, unused if zeros is None else zeros, unused if bias is None else bias, out, M, N, K,
        FORMAT=kind, GROUP=group, ZEROS=zeros is not None, BIAS=bias is not None, SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        block = 256
        sum_splits[(triton.cdiv(N, block), M)](
            out, unused if bias is None else bias, y, M, N, BIAS=bias is not None, SPLITS=splits, BLOCK=block
        )
    return y
