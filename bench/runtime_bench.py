"""`plancast bench runtime`: what the runtime itself costs a step, on an executor that costs nothing, how long a device
waits for it, and what its paged cache saves. Milliseconds are wall time on one core unless it says otherwise; the
sampler is the real one, on a small vocabulary, so that what is measured is bookkeeping and not the arithmetic over
logits (`bench sampler` measures that).
"""

from __future__ import annotations

import cProfile
import io
import itertools
import pstats
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.core_workloads import Job, make_jobs, quantile
from bench.fake_executor import FakeExecutor
from bench.kv_waste import measure_reuse, measure_sharing, measure_waste
from bench.machine import describe_machine
from bench.overlap import STEP_MS, measure_idle
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.iteration_log import StepTimes
from runtime.messages import EngineRequest
from runtime.sampling_params import SamplingParams

# What a step may cost (ms) at so many running requests, so that the engine is the limit and not Python.
GOALS = {16: 0.5, 128: 2.0}


@dataclass(slots=True)
class StepCost:
    """Milliseconds a step: medians of its parts, median and 90th percentile of the whole, and processor time."""

    workload: str
    running: int
    schedule: float
    build: float
    sample: float  # sampling, bookkeeping, deltas
    total: float
    total_p90: float
    cpu: float


def measure_steps(running: int, *, steps: int = 600, churn: bool = False, iteration_log: str | None = None) -> StepCost:
    """The cost of a step with so many running requests.

    All decode at 256 to 856 tokens of context; or, with `churn`, prompts of 128 tokens and answers of 128 come and go.
    """
    prompt, output = (128, 128) if churn else (256, steps + 600)
    core = EngineCore(
        FakeExecutor(running * (prompt + output + 64) // 32),
        EngineConfig(
            max_context_len=prompt + output,
            max_num_seqs=running,
            max_num_batched_tokens=max(512, running),
            iteration_log=iteration_log,
        ),
        clock=time.perf_counter,
    )
    jobs = itertools.cycle(make_jobs([(prompt, output)] * 200))
    added = 0

    def step() -> StepTimes:
        nonlocal added
        while len(core.requests) < running:
            _add(core, next(jobs), added)
            added += 1
        core.step()
        assert core.last_step is not None
        return core.last_step

    for _ in range(2 * output if churn else running * prompt // 512 + 32):  # to the steady state
        step()
    cpu_start = time.thread_time()
    times = [step() for _ in range(steps)]
    cpu = (time.thread_time() - cpu_start) / steps
    core.close()
    schedule = [1e3 * (t.scheduled - t.began) for t in times]
    build = [1e3 * (t.built - t.scheduled) for t in times]
    sample = [1e3 * (t.ended - t.ran) for t in times]
    total = [sum(parts) for parts in zip(schedule, build, sample, strict=True)]
    return StepCost(
        workload="requests come and go" if churn else "all decode",
        running=running,
        schedule=quantile(schedule, 0.5),
        build=quantile(build, 0.5),
        sample=quantile(sample, 0.5),
        total=quantile(total, 0.5),
        total_p90=quantile(total, 0.9),
        cpu=cpu * 1e3,
    )


def _add(core: EngineCore, job: Job, index: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
    core.add_request(
        EngineRequest(request_id=str(index), prompt_token_ids=job.prompt, params=params, arrival_time=core.clock())
    )


def bench_runtime(
    running: tuple[int, ...] = (1, 16, 64, 128),
    *,
    steps: int = 600,
    waste_jobs: int = 400,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Everything that `plancast bench runtime` reports, as plain data."""
    costs = []
    for churn in (False, True):
        for count in running:
            progress(f"a step with {count} requests, {'coming and going' if churn else 'decoding'}")
            costs.append(asdict(measure_steps(count, steps=steps, churn=churn)))
    idle = []
    for count in running:
        progress(f"a device's idle time with {count} requests")
        idle.append(asdict(measure_idle(count, steps=min(steps, 100))))
    progress("KV memory")
    sharing, reuse = measure_sharing(), measure_reuse()
    return {
        "machine": describe_machine(),
        "steps": costs,
        "goals_ms": GOALS,
        "device_step_ms": STEP_MS,
        "device_idle": idle,
        "waste": [asdict(measure_waste(size, num_jobs=waste_jobs)) for size in (16, 32, 64)],
        "sharing": asdict(sharing) | {"saved": sharing.saved},
        "prefix_reuse": asdict(reuse) | {"saved": reuse.saved},
    }


def print_report(report: dict) -> None:
    """The report as tables."""
    from rich.console import Console
    from rich.table import Table

    console, machine = Console(), report["machine"]
    table = Table(title=f"The runtime's own time a step (ms), {machine['processor']}, {machine['date']}")
    for title in ("workload", "running", "schedule", "build batch", "sample, book", "total", "p90", "CPU", "goal"):
        table.add_column(title, justify="left" if title == "workload" else "right")
    for row in report["steps"]:
        goal = report["goals_ms"].get(row["running"])
        figures = [f"{row[name]:.3f}" for name in ("schedule", "build", "sample", "total", "total_p90", "cpu")]
        table.add_row(row["workload"], str(row["running"]), *figures, "" if goal is None else f"< {goal:g}")
    console.print(table)
    title = f"A device's idle time (ms) a decode step of {report['device_step_ms']:g} ms, by processor time"
    table = Table(title=title)
    for title in ("running", "vocabulary", "host samples, in turn", "device samples, beside the host"):
        table.add_column(title, justify="right")
    for row in report["device_idle"]:
        figures = (f"{row[name]:.3f}" for name in ("serial", "beside"))
        table.add_row(str(row["running"]), str(row["vocab_size"]), *figures)
    console.print(table)
    table = Table(title="KV cells allocated and empty, ShareGPT-like lengths, 64 sequences (mean over the run)")
    for title in ("block size", "paged", "final length reserved", "context of 2048 reserved"):
        table.add_column(title, justify="right")
    for row in report["waste"]:
        shares = [f"{row[name]:.1%}" for name in ("paged", "reserved_exact", "reserved_context")]
        table.add_row(str(row["block_size"]), *shares)
    console.print(table)
    sharing, reuse = report["sharing"], report["prefix_reuse"]
    console.print(
        f"{sharing['n']} samples of a prompt of {sharing['prompt_tokens']} tokens, {sharing['output_tokens']} new ones "
        f"each: {sharing['blocks']} blocks instead of {sharing['unshared_blocks']} ({sharing['saved']:.0%} saved)"
    )
    console.print(
        f"A second prompt with 1000 tokens in common: {reuse['second']} tokens computed instead of {reuse['first']} "
        f"({reuse['saved']:.1%} saved)"
    )


def profile(running: int = 128, steps: int = 500, lines: int = 15) -> str:
    """Where a step's time goes, by function (cProfile makes everything two to three times slower)."""
    profiler = cProfile.Profile()
    profiler.enable()
    measure_steps(running, steps=steps)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return text.getvalue()
