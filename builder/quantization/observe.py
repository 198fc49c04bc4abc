"""What flows into the linear modules of a layer: which share an input, and that input's moments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(slots=True)
class Moments:
    """Of one input `x` `[K]` over all calibration tokens: the mean of `x x^T`, the mean and the largest `|x|`."""

    tokens: int = 0
    product: torch.Tensor | None = None
    total: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Count the tokens of `x` `[..., K]`."""
        rows = x.detach().reshape(-1, x.shape[-1])
        magnitude = rows.abs()
        if self.product is None or self.total is None or self.largest is None:
            self.product = torch.zeros(rows.shape[1], rows.shape[1])
            self.total, self.largest = torch.zeros(rows.shape[1]), torch.zeros(rows.shape[1])
        self.product.addmm_(rows.T, rows)
        self.total += magnitude.sum(0)
        torch.maximum(self.largest, magnitude.amax(0), out=self.largest)
        self.tokens += len(rows)

    @property
    def hessian(self) -> NDArray[np.float32]:
        assert self.product is not None
        return (self.product / self.tokens).numpy()

    @property
    def magnitude(self) -> NDArray[np.float32]:
        assert self.total is not None
        return (self.total / self.tokens).numpy()

    @property
    def peak(self) -> NDArray[np.float32]:
        assert self.largest is not None
        return self.largest.numpy()


@dataclass(slots=True)
class InputGroup:
    """Linear modules that take the same tensor, by name, in the order in which they run."""

    names: list[str]
    modules: list[torch.nn.Linear]
    moments: Moments = field(default_factory=Moments)


@dataclass(slots=True)
class Flow:
    """The groups of a layer, and which module returned the tensor that each takes (by identity)."""

    groups: list[InputGroup]
    inputs: list[torch.Tensor]
    outputs: dict[int, Any]


def find_flow(layer: torch.nn.Module, run: Callable[[], Any]) -> Flow:
    """Run the layer once and note what goes where."""
    flow = Flow([], [], {})
    made: list[Any] = []  # keeps tensors alive, so that identities stay theirs

    def before(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            assert isinstance(module, torch.nn.Linear)
            for group, tensor in zip(flow.groups, flow.inputs, strict=True):
                if tensor is given[0]:
                    group.names.append(name)
                    group.modules.append(module)
                    return
            flow.groups.append(InputGroup([name], [module]))
            flow.inputs.append(given[0])

        return hook

    def after(module: torch.nn.Module, _: Any, result: Any) -> None:
        made.append(result)
        flow.outputs.setdefault(id(result), module)

    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(before(name)))
        hooks.append(module.register_forward_hook(after))
    with _removing(hooks):
        run()
    return flow


def observe(groups: Sequence[InputGroup], batches: Sequence[torch.Tensor], run: Callable[[torch.Tensor], Any]) -> None:
    """Count anew what flows into `groups` while `run` runs the layer on each batch; it is cut off after the last."""
    for group in groups:
        group.moments = Moments()
    hooks = [group.modules[0].register_forward_pre_hook(_adding_to(group, group is groups[-1])) for group in groups]
    with _removing(hooks):
        for batch in batches:
            with contextlib.suppress(_SeenEnough):
                run(batch)


class _SeenEnough(Exception):  # noqa: N818 - no error
    """Ends a layer's run where nothing after it is wanted."""


def _adding_to(group: InputGroup, last: bool) -> Callable[..., None]:
    def hook(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        group.moments.add(given[0])
        if last:
            raise _SeenEnough

    return hook


@contextlib.contextmanager
def _removing(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
