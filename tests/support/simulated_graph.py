"""CUDA graphs on the CPU, behind the torch engine's own interface: what is captured runs at replay and not before.

Every operator that torch dispatches is recorded with its very tensors, and so is every launch of a Triton kernel (by
the interpreter). A replay executes the list on those tensors again, with no Python of the engine's between: whatever
the engine computed on the host stays as it was when it was captured, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class SimulatedCapture:
    """A `Capture` of `plugins/torch_engine/graphs.py`. `fails`: nothing can be captured."""

    def __init__(self, *, fails: bool = False):
        self.fails = fails
        self.captures = 0
        self.launches = 0  # of Triton kernels, replayed

    def __call__(self, work: Callable[[], dict[str, Tensor]]) -> Any:
        self.captures += 1
        if self.fails:
            return None
        tape = _Tape()
        launch = GridExecutor.__call__

        def record(executor: GridExecutor, *arguments: Any, **named: Any) -> None:
            tape.steps.append(lambda: self._launch(launch, executor, arguments, named))

        with mock.patch.object(GridExecutor, "__call__", record), tape:
            results = work()
        tape.spoil()
        return results, tape.replay

    def _launch(self, launch: Callable[..., None], executor: GridExecutor, arguments: Any, named: Any) -> None:
        self.launches += 1
        launch(executor, *arguments, **named)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if func._schema.is_mutable:
            known = {_memory(tensor) for tensor in self.made}
            assert _memory(args[0]) in known, f"{func} writes what the graph did not make"
            self.steps.append(lambda: func(*args, **kwargs))
            return result
        # What shares memory with an input is a view of it, and stays one.
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _memory(leaf) not in given]
        if outputs:
            self.made += outputs
            self.steps.append(lambda: self._again(func, args, kwargs, outputs))
        return result

    def _again(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        new = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for old, fresh in zip(outputs, new, strict=True):
            old.copy_(fresh)

    def spoil(self) -> None:
        """A capture computes nothing: what it left behind is no result."""
        for tensor in self.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

    def replay(self) -> None:
        for step in self.steps:
            step()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
