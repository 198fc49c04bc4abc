"""An executor that costs nothing, to measure everything around it, and one that costs what a model of costs says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.executor import RowSampling, SampledRows, StepBatch
from runtime.kv_layout import KvLayer, KvLayout


class FakeExecutor:
    """Returns the same logits whatever the batch: what remains of a step is the runtime's own time.

    `cost(batch)` gives a step's seconds, spent by `wait` (sleep, or a simulated clock's advance).
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 32,
        vocab_size: int = 1024,
        max_rows: int = 512,
        cost: Callable[[StepBatch], float] | None = None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        layer = KvLayer(num_kv_heads=1, key_head_size=8, value_head_size=8, key_dtype="f16", value_dtype="f16")
        self.kv_layout = KvLayout(block_size=block_size, layers=(layer,))
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.steps = 0
        self._cost, self._wait, self._clock = cost, wait, clock
        self._logits = np.random.default_rng(0).standard_normal((max_rows, vocab_size)).astype(np.float32)

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        self.steps += 1
        if self._cost is not None:
            self._wait(self._cost(batch))
        return self._logits[: len(batch.logits_rows)]

    def read_block(self, block_id: int) -> bytes:
        return bytes(self.kv_layout.bytes_per_block)

    def write_block(self, block_id: int, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class FakeDevice(FakeExecutor):
    """The same, computing beside the host: a step is done `cost(batch)` seconds, by `clock`, after its launch. It
    samples greedily, whatever it is asked for."""

    max_top_logprobs: int | None = 20
    max_draft_entries = 0

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._likeliest = self._logits.argmax(axis=1).astype(np.int32)
        self._flight: tuple[float, int, bool] = 0.0, 0, False  # when it is done, its rows, whether they are sampled

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        cost = self._cost(batch) if self._cost is not None else 0.0
        self._flight = self._clock() + cost, len(batch.logits_rows), sampling is not None

    def collect(self) -> tuple[NDArray[np.float32], SampledRows | None]:
        self.steps += 1
        done, rows, sampled = self._flight
        self._wait(max(0.0, done - self._clock()))
        return self._logits[:rows], SampledRows(self._likeliest[:rows], None) if sampled else None


class SimulatedClock:
    """Time that passes only when somebody waits: a simulation runs as fast as Python, and gives the same every time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
