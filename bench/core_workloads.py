"""Workloads for the engine core, and the loop that plays one: requests arrive at their times, answers are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.fake_executor import SimulatedClock
from runtime.engine_core import EngineCore
from runtime.messages import EngineRequest
from runtime.sampling_params import SamplingParams

# ShareGPT's mean lengths in tokens (PagedAttention paper, Kwon et al. 2023, figure 11). The spread of the log is ours:
# it gives the long tail that the figure shows.
SHAREGPT_MEANS = (161.31, 337.99)
SHAREGPT_SIGMAS = (1.1, 0.8)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload: when it comes (seconds), its prompt, and how many tokens it wants."""

    arrival: float
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Served:
    """How a job was served. Times in seconds from the workload's start."""

    arrival: float
    tokens: int = 0
    first_token: float | None = None
    end: float | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        assert self.first_token is not None
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time of a token after the first."""
        assert self.first_token is not None
        assert self.end is not None
        return (self.end - self.first_token) / (self.tokens - 1) if self.tokens > 1 else 0.0


def sharegpt_lengths(count: int, *, max_context_len: int = 2048, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths (tokens) with ShareGPT's means and a long tail, within the context."""
    rng = np.random.default_rng(seed)
    columns = []
    for mean, sigma in zip(SHAREGPT_MEANS, SHAREGPT_SIGMAS, strict=True):
        columns.append(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).round().astype(int))
    prompts = columns[0].clip(4, max_context_len * 3 // 4)
    outputs = np.minimum(columns[1].clip(4), max_context_len - prompts)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def make_jobs(
    lengths: list[tuple[int, int]], *, rate: float | None = None, vocab_size: int = 1024, seed: int = 0
) -> list[Job]:
    """Jobs of random tokens; Poisson arrivals at `rate` requests a second, or all at once (None)."""
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(len(lengths)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(lengths)))
    return [
        Job(float(arrival), rng.integers(0, vocab_size, prompt).tolist(), output)
        for arrival, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]


def play(core: EngineCore, jobs: list[Job], on_step: Callable[[EngineCore], None] | None = None) -> list[Served]:
    """Run the jobs to their ends on the core's clock: a simulated one jumps over idle time, a real one sleeps."""
    clock = core.clock
    start = clock()
    served = [Served(job.arrival) for job in jobs]
    coming = sorted(range(len(jobs)), key=lambda index: jobs[index].arrival)[::-1]
    while coming or core.has_work():
        while coming and start + jobs[coming[-1]].arrival <= clock():
            index = coming.pop()
            core.add_request(_request(index, jobs[index], start))
        if not core.has_work():
            _wait(clock, start + jobs[coming[-1]].arrival - clock())
            continue
        outputs = core.step()
        now = clock() - start
        for delta in outputs.deltas:
            if delta.error is not None:
                raise RuntimeError(f"job {delta.request_id} was refused: {delta.error}")
            answer = served[int(delta.request_id)]
            answer.tokens += sum(len(part.new_token_ids) for part in delta.sequences)
            if answer.first_token is None:
                answer.first_token = now
            if delta.finished:
                answer.end = now
        if on_step is not None:
            on_step(core)
    return served


def _request(index: int, job: Job, start: float) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=str(index), prompt_token_ids=job.prompt, params=params, arrival_time=start + job.arrival
    )


def _wait(clock: Callable[[], float], seconds: float) -> None:
    if isinstance(clock, SimulatedClock):
        clock.wait(max(seconds, 0.0))
    else:
        time.sleep(max(seconds, 0.0))


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
