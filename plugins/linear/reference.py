"""The NumPy truth of `plancast::Linear`: the same rounding and the same sums, in the same order, as the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.linear.op import BLOCK, LEAST, Activations, Weight, activation_levels, group_count


def quantize_rows(x: NDArray[np.float32], levels: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """f32 [..., K] -> integers of the same shape within +-levels (ties to even), and the scale f32 [...] of each row.

    A row of magnitudes below `LEAST` has scale 0; a row with NaN or infinity has scale NaN, which spreads.
    """
    largest = np.abs(x).max(axis=-1, initial=0.0).astype(np.float32)
    finite = np.isfinite(largest)
    used = finite & (largest >= LEAST)
    inverse = np.divide(np.float32(levels), largest, out=np.zeros_like(largest), where=used)
    quantized = np.rint(np.where(used[..., None], x, 0).astype(np.float32) * inverse[..., None])
    with np.errstate(invalid="ignore"):
        scale = np.where(used, largest * np.float32(1 / levels), np.where(finite, np.float32(0), np.float32(np.nan)))
    return np.clip(quantized, -levels, levels).astype(np.int32), scale.astype(np.float32)


def reference(
    x: NDArray[np.float32],
    weight: Weight,
    activations: Activations,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """`y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])`, x rounded as `activations` says.

    Args:
        x: f32 [M, K].
        weight: [N, K].
        bias: f32 [N], or None.

    Returns:
        f32 [M, N]. Exact to the bit for int8 and int4 weights; for bf16 the exact sums, rounded once.
    """
    if weight.kind == "bf16":
        y = _bf16(x, weight, activations)
    elif activations == "int16":
        y = _int16(x, weight)
    else:
        y = _int8(x, weight)
    return y + bias if bias is not None else y


def dense(weight: Weight) -> NDArray[np.float64]:
    """The weight's values, f64 [N, K]."""
    if weight.kind == "bf16":
        return (weight.values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert weight.scale is not None
    width = weight.group or weight.columns
    scale = np.repeat(weight.scale.astype(np.float64), width, axis=1)[:, : weight.columns]
    low = _low(weight)
    if low is not None:
        return weight.values * scale + np.repeat(low.astype(np.float64), width, axis=1)[:, : weight.columns]
    return _integers(weight) * scale


def _low(weight: Weight) -> NDArray[np.float32] | None:
    """What is added to `scale * q`, f32 [N, groups]."""
    if weight.zero is not None:
        assert weight.scale is not None
        return weight.scale * -weight.zero.astype(np.float32)
    return weight.minimum


def _fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray[np.float32]:
    """a * b + c of f32, rounded once (a product of two f32 is exact in f64)."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _integers(weight: Weight) -> NDArray[np.int64]:
    centre = 8 if weight.kind == "int4" and weight.low == "none" else 0
    return weight.values.astype(np.int64) - centre


def _int8(x: NDArray[np.float32], weight: Weight) -> NDArray[np.float32]:
    rows, columns = x.shape
    blocks = -(-columns // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :columns] = x
    values, scale = quantize_rows(padded.reshape(rows, blocks, BLOCK), 127)
    w = np.zeros((weight.channels, blocks * BLOCK), np.int64)
    w[:, :columns] = _integers(weight)
    w = w.reshape(weight.channels, blocks, BLOCK)
    assert weight.scale is not None
    grouped = group_count(columns, weight.group) > 1
    total = np.zeros((rows, weight.channels), np.float32)
    low = _low(weight)
    all_sums = np.zeros(rows, np.float32)
    for block in range(blocks):
        value = (values[:, block].astype(np.int64) @ w[:, block].T).astype(np.float32)
        row_scale, group = scale[:, block], block * BLOCK // weight.group if weight.group else 0
        sums = row_scale * values[:, block].sum(axis=1).astype(np.float32)
        all_sums = (all_sums + sums).astype(np.float32)
        if grouped:
            value = value * weight.scale[:, group]
        total = _fma(value, row_scale[:, None], total)
        if grouped and low is not None:
            total = _fma(low[None, :, group], sums[:, None], total)
    if not grouped:
        total = total * weight.scale[None, :, 0]
        if low is not None:
            total = _fma(low[None, :, 0], all_sums[:, None], total)
    return total


def _int16(x: NDArray[np.float32], weight: Weight) -> NDArray[np.float32]:
    values, row_scale = quantize_rows(x, activation_levels(x.shape[1]))
    assert weight.scale is not None
    groups = group_count(weight.columns, weight.group)
    total = np.zeros((x.shape[0], weight.channels), np.float32)
    for group in range(groups):
        part = slice(group * weight.group, (group + 1) * weight.group) if weight.group else slice(None)
        value = (values[:, part].astype(np.int64) @ _integers(weight)[:, part].T).astype(np.float32)
        total = _fma(value, weight.scale[None, :, group], total)
    return total * row_scale[:, None]


def round_bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """f32 rounded to bf16 (ties to even), as f32; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def _bf16(x: NDArray[np.float32], weight: Weight, activations: Activations) -> NDArray[np.float32]:
    rounded = round_bf16(x).astype(np.float64)
    if activations == "bf16x2":
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(rounded), x - rounded, 0).astype(np.float32)
        rounded = rounded + round_bf16(rest)
    with np.errstate(invalid="ignore"):
        return (rounded @ dense(weight).T).astype(np.float32)
