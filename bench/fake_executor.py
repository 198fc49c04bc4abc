"""An executor that costs nothing, to measure everything around it, and one that costs what a model of costs says."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.executor import StepBatch
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
    ):
        layer = KvLayer(num_kv_heads=1, key_head_size=8, value_head_size=8, key_dtype="f16", value_dtype="f16")
        self.kv_layout = KvLayout(block_size=block_size, layers=(layer,))
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.steps = 0
        self._cost, self._wait = cost, wait
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


class SimulatedClock:
    """Time that passes only when somebody waits: a simulation runs as fast as Python, and gives the same every time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
