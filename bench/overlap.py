"""How long a device waits for the host between two steps: what the runtime does while the device computes is hidden.

The device is simulated: a step takes so many milliseconds from its launch. The host's time is its processor time, so
that other work on the machine does not count; waiting for the device passes on the same clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from bench.core_workloads import make_jobs, quantile
from bench.fake_executor import FakeDevice, FakeExecutor
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.engine_loop import EngineLoop
from runtime.messages import EngineRequest, FromEngine, Shutdown, StepOutputs, ToEngine
from runtime.sampling_params import SamplingParams

STEP_MS = 2.0  # about what a small model's decode step takes
_CONTEXT = 512


class ProcessorClock:
    """This thread's processor time, and what was waited for."""

    def __init__(self) -> None:
        self._waited = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._waited

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._waited += seconds


@dataclass(slots=True)
class Idle:
    """Median milliseconds a decode step beyond what the device takes: where the host samples and the device waits for
    it, and where the device samples and the host works beside it."""

    running: int
    vocab_size: int
    serial: float
    beside: float


class _Client:
    """A channel that hands all requests over at once, and encodes what it is sent as the engine process does."""

    def __init__(self, clock: ProcessorClock, running: int, steps: int):
        self._clock, self._steps = clock, steps
        jobs = make_jobs([(128, steps + 32)] * running)
        self._due: list[ToEngine] = [
            EngineRequest(
                request_id=str(i), prompt_token_ids=job.prompt, arrival_time=0.0,
                params=SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True),
            )
            for i, job in enumerate(jobs)
        ]  # fmt: skip
        self._running = running
        self._encoder = msgspec.msgpack.Encoder()
        self.times: list[float] = []  # when each step of all requests was told

    def receive(self, timeout: float) -> list[ToEngine]:
        due, self._due = self._due, []
        if len(self.times) > self._steps:
            return [*due, Shutdown()]
        return due

    def send(self, message: FromEngine) -> None:
        self._encoder.encode(message)
        if isinstance(message, StepOutputs) and len(message.deltas) == self._running:
            self.times.append(self._clock())


def measure_idle(running: int, *, vocab_size: int = 49_152, steps: int = 100, step_ms: float = STEP_MS) -> Idle:
    """The device's idle time a step with so many requests that all decode."""
    idle = []
    for executor_class in (FakeExecutor, FakeDevice):
        clock = ProcessorClock()
        executor = executor_class(
            running * _CONTEXT // 16, vocab_size=vocab_size, max_rows=running, cost=lambda batch: step_ms / 1e3,
            wait=clock.wait, clock=clock,
        )  # fmt: skip
        config = EngineConfig(max_context_len=_CONTEXT, max_num_seqs=running, max_num_batched_tokens=8192)
        core = EngineCore(executor, config, clock=clock)
        client = _Client(clock, running, min(steps, _CONTEXT - 128 - 64))
        EngineLoop(core, client).run()
        gaps = [after - before for before, after in zip(client.times[8:], client.times[9:], strict=False)]
        idle.append(max(0.0, quantile(gaps, 0.5) * 1e3 - step_ms))
    return Idle(running, vocab_size, *idle)
