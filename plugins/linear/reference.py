"""The NumPy truth of `plancast::Linear`: the same quantization and the same integer sums as the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.linear.op import activation_levels


def quantize_rows(x: NDArray[np.float32], levels: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """f32 [M, K] -> integers [M, K] within +-levels (ties to even), and the scale f32 [M] of each row.

    A row of zeros has scale 0; a row with NaN or infinity has scale NaN, which makes its whole output NaN.
    """
    largest = np.abs(x).max(axis=1, initial=0.0).astype(np.float32)
    finite = np.isfinite(largest)
    used = finite & (largest > 0)
    inverse = np.divide(np.float32(levels), largest, out=np.zeros_like(largest), where=used)
    quantized = np.rint(np.where(used[:, None], x, 0).astype(np.float32) * inverse[:, None])
    scale = np.where(finite, largest * np.float32(1 / levels), np.float32(np.nan)).astype(np.float32)
    return np.clip(quantized, -levels, levels).astype(np.int32), scale


def reference(
    x: NDArray[np.float32],
    weight: NDArray[np.int8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """`y[m, n] = sum_k a[m, k] w[n, k] * row_scale[m] * scale[n] (+ bias[n])`.

    Args:
        x: f32 [M, K].
        weight: int8 [N, K], not packed.
        scale: f32 [N].
        bias: f32 [N], or None.

    Returns:
        f32 [M, N].
    """
    quantized, row_scale = quantize_rows(x, activation_levels(x.shape[1]))
    sums = quantized.astype(np.int64) @ weight.astype(np.int64).T
    y = np.multiply(sums.astype(np.float32), row_scale[:, None] * scale[None, :], dtype=np.float32)
    return y + bias if bias is not None else y
