"""Decode steps of a torch engine captured as CUDA graphs: what a step launches, replayed without Python.

A graph replays launches of fixed sizes from fixed addresses. So steps of one number of sequences (padded to it by who
calls) read their inputs from buffers that stay where they are, and one copy fills them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugins.paged_attention.grids import power_of_two

if TYPE_CHECKING:
    from plugins.torch_engine.engine import TorchEngine

Results = dict[str, Tensor]
# Takes work that launches and returns its results; gives what replays the launches, or None where that cannot be done.
# Nothing that `work` launches runs before the first replay, which fills the results.
Capture = Callable[[Callable[[], Results]], "tuple[Results, Callable[[], None]] | None"]
_ALIGNMENT = 256  # bytes


class CudaCapture:
    """`Capture` by CUDA graphs. They share memory: one runs at a time, and its results are read before the next."""

    def __init__(self) -> None:
        self._pool: object = None

    def __call__(self, work: Callable[[], Results]) -> tuple[Results, Callable[[], None]] | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
                results = work()
        except RuntimeError:  # a step waits for the device, or copies from the host
            return None
        return results, graph.replay


class StaticInputs:
    """Input tensors that stay where they are: views of one block of bytes on the device, filled by one copy."""

    def __init__(self, lengths: Mapping[str, tuple[int, np.dtype]], device: torch.device):
        """`lengths`: elements and dtype of each input."""
        offsets, end = {}, 0
        for name, (count, dtype) in lengths.items():
            offsets[name] = end
            end += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host, self._device = host, torch.zeros(end, dtype=torch.uint8, device=device)
        self._views: dict[str, NDArray] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, (count, dtype) in lengths.items():
            part = slice(offsets[name], offsets[name] + count * dtype.itemsize)
            self._views[name] = host[part].numpy().view(dtype)
            self.tensors[name] = self._device[part].view(torch.from_numpy(np.empty(0, dtype)).dtype)

    def fill(self, feeds: Mapping[str, NDArray]) -> None:
        """Write the inputs, each at the begin of its buffer. The step before is done with the buffers."""
        for name, view in self._views.items():
            array = feeds[name]
            view[: len(array)] = array
        self._device.copy_(self._host, non_blocking=True)


@dataclass
class _Made:
    """One kind of step. `replay` None: it could not be captured, and runs launch by launch."""

    inputs: StaticInputs
    context: Tensor  # `max_context_len`, on the CPU
    placed: dict[str, Tensor] = field(default_factory=dict)
    results: Results = field(default_factory=dict)
    replay: Callable[[], None] | None = None


class DecodeGraphs:
    """Runs decode steps of an engine by graphs.

    Attributes:
        replays: how many steps ran so.
    """

    def __init__(self, engine: TorchEngine, capture: Capture, max_blocks: int):
        """`max_blocks`: of the longest sequence; block tables differ in length from step to step, their buffer not."""
        self._engine, self._capture, self._max_blocks = engine, capture, max_blocks
        self._made: dict[tuple[int, tuple[int, ...]], _Made] = {}
        self.replays = 0

    @property
    def captured(self) -> list[tuple[int, tuple[int, ...]]]:
        """The kinds of steps that run by graphs: sequences, and the splits of each layer's keys."""
        return [key for key, made in self._made.items() if made.replay is not None]

    @torch.inference_mode()
    def run(self, feeds: Mapping[str, NDArray]) -> Tensor:
        """Logits [sequences, vocab_size], on the device, of a decode step, each of whose sequences has one token and
        wants logits. The next step overwrites them.

        The first step of a kind runs launch by launch (kernels compile, libraries prepare themselves), those after it
        by its graph.
        """
        sequences = len(feeds["past_lens"])
        # The length decides nothing but how many pieces the keys are split in.
        context = power_of_two(int(feeds["max_context_len"]))
        key = (sequences, self._engine.splits(sequences, context))
        made = self._made.get(key)
        if made is None:
            lengths = {name: (len(array), array.dtype) for name, array in feeds.items() if array.ndim}
            lengths["block_ids"] = (sequences * self._max_blocks, feeds["block_ids"].dtype)
            made = _Made(StaticInputs(lengths, self._engine.device), torch.tensor(context, dtype=torch.int32))
            made.inputs.fill(feeds)
            logits = self._logits(self._step(made))
            captured = self._capture(lambda: self._step(made))
            if captured is not None:
                made.results, made.replay = captured
            self._made[key] = made
            return logits
        made.inputs.fill(feeds)
        if made.replay is None:
            return self._logits(self._step(made))
        made.replay()
        self.replays += 1
        return self._logits(made.results)

    def _step(self, made: _Made) -> Results:
        return self._engine.evaluate(made.inputs.tensors | {"max_context_len": made.context}, made.placed)

    def _logits(self, results: Results) -> Tensor:
        return results[self._engine.output_names[0]]
