"""Scales moved from a layer's inputs into its weights: AWQ and SmoothQuant.

`W x = (W diag(s)) (diag(1/s) x)`: the weight's columns grow by `s`, and whatever makes `x` shrinks by it - the weight
of a norm, or the rows of the projection before. Which modules of a layer those are is found out by looking
(`find_folds`) and proved by running: the layer's output must stay what it was.

AWQ: J. Lin et al., https://arxiv.org/abs/2306.00978. SmoothQuant: G. Xiao et al., https://arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from builder.quantization import rounding
from builder.quantization.gptq import output_error
from builder.quantization.scheme import Scheme

_RATIOS = 10  # exponents tried between 0 and 1
_SAME = 1e-4  # relative difference of a layer's outputs that counts as none


@dataclass(frozen=True, slots=True)
class Fold:
    """Linear modules that take one input, and the module whose output that is: a norm, or a linear before.

    `repeat`: query heads that share one of the producer's heads, each of `head` channels; 1 where nothing is shared.
    """

    producer: torch.nn.Module
    consumers: tuple[torch.nn.Linear, ...]
    repeat: int = 1
    head: int = 1

    def shared(self, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scales with one value for inputs that come from one output of the producer (their geometric mean)."""
        if self.repeat == 1:
            return scales
        by_head = np.log(scales).reshape(-1, self.repeat, self.head).mean(1, keepdims=True)
        return np.exp(np.broadcast_to(by_head, (by_head.shape[0], self.repeat, self.head))).reshape(-1)

    def apply(self, scales: NDArray[np.float32]) -> None:
        """Multiply the consumers' columns by `scales` and divide what the producer makes by them."""
        factor = torch.from_numpy(scales)
        own = factor
        if self.repeat > 1:
            own = factor.reshape(-1, self.repeat, self.head)[:, 0].reshape(-1)
        with torch.no_grad():
            for module in self.consumers:
                module.weight.mul_(factor)
            weight = self.producer.weight
            assert isinstance(weight, torch.Tensor)
            weight.div_(own.reshape([-1] + [1] * (weight.dim() - 1)))
            bias = getattr(self.producer, "bias", None)
            if isinstance(bias, torch.Tensor):
                bias.div_(own)


def find_folds(
    layer: torch.nn.Module, inputs: Sequence[tuple[tuple[torch.nn.Linear, ...], torch.Tensor]], outputs: dict[int, Any]
) -> list[Fold]:
    """What may be folded in `layer`.

    Args:
        inputs: linear modules by the very input tensor that they share, with that tensor.
        outputs: modules by the identity of the tensor that they returned.
    """
    folds = []
    modules = dict(layer.named_modules())
    for consumers, tensor in inputs:
        maker = outputs.get(id(tensor))
        weight = getattr(maker, "weight", None)
        if maker is not None and isinstance(weight, torch.Tensor) and weight.shape == tensor.shape[-1:]:
            folds.append(Fold(maker, consumers))
            continue
        if len(consumers) != 1:
            continue
        name = next(name for name, module in modules.items() if module is consumers[0])
        for after, before in (("o_proj", "v_proj"), ("down_proj", "up_proj"), ("out_proj", "v_proj")):
            producer = modules.get(name.replace(after, before)) if name.endswith(after) else None
            if not isinstance(producer, torch.nn.Linear):
                continue
            made, taken = producer.out_features, consumers[0].in_features
            if made == taken:
                folds.append(Fold(producer, consumers))
            elif taken % made == 0 and (head := _head_size(layer)) and made % head == 0:
                folds.append(Fold(producer, consumers, taken // made, head))
    return folds


def proved(fold: Fold, run: Callable[[], torch.Tensor]) -> bool:
    """Whether the layer's output stays the same when `fold` is applied; what was done is undone."""
    before = run()
    trial = fold.shared(np.linspace(0.5, 2.0, fold.consumers[0].in_features, dtype=np.float32))
    kept = [parameter.detach().clone() for parameter in _parameters(fold)]
    fold.apply(trial)
    after = run()
    with torch.no_grad():
        for parameter, value in zip(_parameters(fold), kept, strict=True):
            parameter.copy_(value)
    return float((after - before).abs().max()) <= _SAME * max(float(before.abs().max()), 1e-6)


def awq_scales(
    fold: Fold, magnitude: NDArray[np.float32], hessian: NDArray[np.float32], schemes: Sequence[Scheme | None]
) -> NDArray[np.float32] | None:
    """The scales `magnitude^ratio` whose rounded weights disturb the output least; None if none beats no scaling.

    Args:
        magnitude: the mean of |x| by channel.
        hessian: the mean of `x x^T`.
        schemes: of each consumer; None for one that stays a float.
    """
    weights = [module.weight.detach().numpy() for module in fold.consumers]
    moments = torch.from_numpy(hessian)

    def loss(scales: NDArray[np.float32]) -> float:
        total = 0.0
        for weight, scheme in zip(weights, schemes, strict=True):
            if scheme is None:
                continue
            total += output_error(weight, rounding.quantize(weight * scales, scheme).dequantize() / scales, moments)
        return total

    best, found = loss(np.ones_like(magnitude)), None
    usable = np.maximum(magnitude, 1e-4 * float(magnitude.mean()) + 1e-12)
    for step in range(1, _RATIOS):
        scales = usable ** np.float32(step / _RATIOS)
        scales = fold.shared((scales / np.sqrt(scales.max() * scales.min())).astype(np.float32))
        error = loss(scales)
        if error < best:
            best, found = error, scales
    return found


def smooth_scales(fold: Fold, largest: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    """SmoothQuant's scales by channel, `max|x|^alpha / max|w|^(1 - alpha)`; `largest`: the largest |x|."""
    weight = np.max([module.weight.detach().abs().amax(0).numpy() for module in fold.consumers], axis=0)
    scales = np.maximum(largest, 1e-5) ** alpha / np.maximum(weight, 1e-5) ** (1 - alpha)
    return fold.shared(np.clip(scales, 1e-4, 1e4).astype(np.float32))


def _parameters(fold: Fold) -> list[torch.Tensor]:
    own = [fold.producer.weight, getattr(fold.producer, "bias", None), *(module.weight for module in fold.consumers)]
    return [parameter for parameter in own if isinstance(parameter, torch.Tensor)]


def _head_size(layer: torch.nn.Module) -> int | None:
    found = [getattr(module, "head_dim", None) for module in layer.modules()]
    sizes = {size for size in found if isinstance(size, int)}
    return sizes.pop() if len(sizes) == 1 else None
