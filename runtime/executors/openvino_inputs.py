"""A step's arrays as the inputs of an OpenVINO infer request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from runtime.executors.step_inputs import SCALAR

if TYPE_CHECKING:
    from runtime.executor import StepBatch

# Arrays of up to so many rows are copied into tensors that stay: a decode's are a few bytes, and making and setting a
# tensor takes longer than any of them takes to copy. Larger ones are handed over as they are.
_MOST_KEPT = 32


@dataclass(slots=True)
class _Input:
    """One input. `kept`: a tensor, and the array that it shows, for each number of rows that came; `bound`: which of
    them the request reads now, 0 for none; `large`: what it reads then, whose memory OpenVINO does not hold."""

    index: int
    name: str
    dtype: Any
    kept: dict[int, tuple[NDArray[Any], ov.Tensor]] = field(default_factory=dict)
    bound: int = 0
    large: NDArray[Any] | None = None


class StepInputs:
    """Binds batches to one request. `inputs`: (the port's index, the batch's field, its dtype), those that it has."""

    def __init__(self, inputs: list[tuple[int, str, Any]]):
        self._inputs = [_Input(*each) for each in inputs]

    def bind(self, request: ov.InferRequest, batch: StepBatch) -> None:
        """Let the next inference of `request` read `batch`."""
        for each in self._inputs:
            value = getattr(batch, each.name)
            rows = 1 if each.name == SCALAR else len(value)
            if not 0 < rows <= _MOST_KEPT:
                each.large = np.ascontiguousarray(value, each.dtype)
                request.set_input_tensor(each.index, ov.Tensor(each.large, shared_memory=True))
                each.bound = 0
                continue
            kept = each.kept.get(rows)
            if kept is None:
                array = np.empty(np.shape(value), each.dtype)
                kept = each.kept[rows] = array, ov.Tensor(array, shared_memory=True)
            kept[0][...] = value
            if each.bound != rows:
                request.set_input_tensor(each.index, kept[1])
                each.bound, each.large = rows, None
