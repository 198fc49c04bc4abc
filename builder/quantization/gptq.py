"""GPTQ: values that make up for each other's rounding errors, by the inputs' second moments.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(https://arxiv.org/abs/2210.17323). Columns are rounded one after another, those with the largest inputs first
("activation order"); each one's error is spread over the columns not rounded yet, so that the layer's output on the
calibration text changes least. Groups are of neighbouring columns whatever the order, with their grids fixed at the
start, so that nothing has to be permuted when the engine runs.

Then every number is chosen anew, given all the others, a few times over: coordinate descent, as in K. Behdin et al.,
"QuantEase" (https://arxiv.org/abs/2309.01885), which GPTQ's columns, rounded once and for all, leave room for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from builder.quantization import rounding
from builder.quantization.scheme import Scheme
from zoo.quantized import QuantizedWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 128  # columns whose errors are spread among themselves before the rest of the weight sees them
_SHRINKS = tuple(1.0 - 0.03 * step for step in range(11))  # how far a grid's range may be narrowed


def gptq(
    weight: NDArray[np.float32],
    hessian: NDArray[np.float32],
    scheme: Scheme,
    *,
    damping: float = 0.01,
    activation_order: bool = True,
    refinements: int = 2,
) -> QuantizedWeight:
    """Quantize `weight` `[N, K]` given `hessian` `[K, K]`, the mean of `x x^T` over the calibration inputs.

    Args:
        damping: what is added to the Hessian's diagonal, as a share of its mean; raised tenfold until the Hessian can
            be inverted.
        activation_order: round the columns with the largest inputs first.
        refinements: how often every number is chosen anew afterwards.
    """
    scale, zero = best_grid(weight, np.diag(hessian), scheme)
    columns = weight.shape[1]
    group = np.arange(columns) // (scheme.group or columns)
    order = np.argsort(-np.diag(hessian), kind="stable") if activation_order else np.arange(columns)
    upper = torch.from_numpy(_inverse_root(hessian[np.ix_(order, order)], damping))
    left = torch.from_numpy(np.ascontiguousarray(weight[:, order]))
    numbers = np.empty_like(weight)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, errors = left[:, start:stop], torch.empty(len(weight), stop - start)
        corner = upper[start:stop, start:stop]
        for column in range(stop - start):
            at = group[order[start + column]]
            values = block[:, column].numpy()
            zeros = None if zero is None else zero[:, at]
            rounded = rounding.nearest(values, scale[:, at], zeros, scheme)
            numbers[:, order[start + column]] = rounded
            error = torch.from_numpy(values - rounding.restored(rounded, scale[:, at], zeros)) / corner[column, column]
            block[:, column + 1 :] -= torch.outer(error, corner[column, column + 1 :])
            errors[:, column] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    for _ in range(refinements):
        _refine(numbers, weight, hessian, scale, zero, scheme, damping)
    return rounding.stored(numbers, scale, zero, scheme)


def _refine(
    numbers: NDArray[np.float32],
    weight: NDArray[np.float32],
    hessian: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32] | None,
    scheme: Scheme,
    damping: float,
) -> None:
    """Set each column of `numbers` `[N, K]`, in place, to what disturbs the output least given all other columns."""
    columns = weight.shape[1]
    moments = torch.from_numpy(hessian) + torch.eye(columns) * (damping * float(np.diag(hessian).mean()))
    group = np.arange(columns) // (scheme.group or columns)
    zeros = None if zero is None else zero[:, group]
    stored = torch.from_numpy(rounding.restored(numbers, scale[:, group], zeros))
    slope = (stored - torch.from_numpy(weight)) @ moments  # half of the error's gradient
    for start in range(0, columns, _BLOCK):
        block = slice(start, min(start + _BLOCK, columns))
        corner, near = moments[block, block], slope[:, block].clone()
        moved = torch.zeros_like(near)
        for column in range(near.shape[1]):
            at = start + column
            curvature = float(corner[column, column])
            if curvature <= 0:  # an input that is always zero
                continue
            wanted = (stored[:, at] - near[:, column] / curvature).numpy()
            own = None if zeros is None else zeros[:, at]
            numbers[:, at] = rounding.nearest(wanted, scale[:, group[at]], own, scheme)
            value = torch.from_numpy(rounding.restored(numbers[:, at], scale[:, group[at]], own))
            moved[:, column] = value - stored[:, at]
            stored[:, at] = value
            near += torch.outer(moved[:, column], corner[column])
        slope += moved @ moments[block]


def best_grid(
    weight: NDArray[np.float32], importance: NDArray[np.floating], scheme: Scheme
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Scale and zero point of each group, its range narrowed as far as lowers the squared error, weighted by column.

    `importance` `[K]`: the mean square of each input.
    """
    blocks = rounding.grouped(weight, scheme)
    scale, zero = rounding.grid(blocks, scheme)
    if scheme.dtype == "fp8":
        return scale, zero
    weights = np.maximum(importance, 1e-12).astype(np.float32).reshape(1, -1, blocks.shape[-1])
    best = np.full(scale.shape, np.inf, np.float32)
    for shrink in _SHRINKS:
        tried, tried_zero = rounding.grid(blocks, scheme, shrink)
        zeros = None if tried_zero is None else tried_zero[..., None]
        numbers = rounding.nearest(blocks, tried[..., None], zeros, scheme)
        error = ((rounding.restored(numbers, tried[..., None], zeros) - blocks) ** 2 * weights).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        scale = np.where(better, tried, scale)
        if zero is not None and tried_zero is not None:
            zero = np.where(better, tried_zero, zero)
    return scale, zero


def quantize_clipped(weight: NDArray[np.float32], importance: NDArray[np.floating], scheme: Scheme) -> QuantizedWeight:
    """Round to nearest on the grids of `best_grid`."""
    scale, zero = best_grid(weight, importance, scheme)
    return rounding.place(rounding.grouped(weight, scheme), scale, zero, scheme)


def output_error(
    weight: NDArray[np.float32], approximation: NDArray[np.float32], moments: NDArray[np.float32] | torch.Tensor
) -> float:
    """The mean squared error of a layer's output on the calibration inputs, relative to the output's mean square.

    `moments` `[K, K]`: the mean of `x x^T`.
    """
    known = torch.as_tensor(moments)
    difference, whole = torch.from_numpy(approximation - weight), torch.from_numpy(weight)
    error = float(((difference @ known) * difference).sum())
    return error / max(float(((whole @ known) * whole).sum()), 1e-30)


def _inverse_root(hessian: NDArray[np.float32], damping: float) -> NDArray[np.float32]:
    """The upper Cholesky factor of the damped Hessian's inverse. Inputs that are always zero count as ones."""
    moments = torch.from_numpy(hessian).double()
    diagonal = moments.diagonal()
    diagonal[diagonal == 0] = float(diagonal.mean()) or 1.0
    while True:
        damped = moments + torch.eye(len(moments), dtype=torch.float64) * (damping * float(diagonal.mean()))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper.float().numpy()
        damping *= 10
