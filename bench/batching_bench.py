"""`plancast bench batching`: in-flight batching against static batching, the same requests on the same engine.

Static batching starts a batch only when the last one has ended. It is given every advantage that it can have here: no
padding, paged KV, chunked prefill, and a sequence that has ended costs nothing; only its slot stays empty.

Without an artifact the engine is simulated: a step costs what `step_seconds` says, and time is counted, not waited
for, so that the figures depend on the scheduling alone and are the same on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.core_workloads import Job, Served, make_jobs, play, quantile, sharegpt_lengths
from bench.fake_executor import FakeExecutor, SimulatedClock
from bench.machine import describe_machine
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.executor import Executor, StepBatch
from runtime.svg import FAINT, Svg

MODES = ("in_flight", "static")
COLOURS = {"in_flight": "#2563eb", "static": "#f59e0b"}


def step_seconds(batch: StepBatch) -> float:
    """A step of SmolLM2-135M in int8 on two cores: weight-bound up to 8 tokens, then compute-bound (measured)."""
    return 0.0059 + 0.00044 * max(0, len(batch.token_ids) - 8)


@dataclass(slots=True)
class ModeResult:
    """One mode's run. Times in seconds. Slots: sequences that could be in a step at once."""

    mode: str
    seconds: float
    steps: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    ttft_median: float
    ttft_p99: float
    tpot_median: float
    idle_slots: float  # mean over all steps; a slot counts as idle only while a request waits for one
    goodput: float | None  # share of requests within the limits, where there are limits
    cpu_seconds: float | None  # processor time, all threads: steadier than `seconds` on a busy machine
    slots: list[tuple[float, int]] = field(default_factory=list)  # (time, sequences in the step)
    ttfts: list[float] = field(default_factory=list)  # ascending


class _Watched:
    """An executor that notes how many sequences each step holds."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.num_sequences = 0

    def run(self, batch: StepBatch):
        self.num_sequences = len(batch.past_lens)
        return self._executor.run(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def run_mode(
    mode: str, jobs: list[Job], executor: Executor, config: dict[str, Any], clock: Callable[[], float]
) -> ModeResult:
    """Play the jobs in one mode."""
    watched: Any = _Watched(executor)
    core = EngineCore(watched, EngineConfig(batching=mode, **config), clock=clock)  # type: ignore[arg-type]
    start = clock()
    slots: list[tuple[float, int]] = []
    idle = 0

    def look(core: EngineCore) -> None:
        nonlocal idle
        slots.append((clock() - start, watched.num_sequences))
        if core.scheduler.waiting:
            idle += core.config.max_num_seqs - watched.num_sequences

    cpu_start = time.process_time()
    served = play(core, jobs, look)
    cpu_seconds = None if isinstance(clock, SimulatedClock) else time.process_time() - cpu_start
    seconds = clock() - start
    stats = core.stats()
    core.close()
    limited = core.config.ttft_slo is not None or core.config.tpot_slo is not None
    goodput = stats.requests_in_slo / len(jobs) if limited else None
    return _result(mode, served, seconds, slots, idle, goodput, cpu_seconds)


def _result(
    mode: str,
    served: list[Served],
    seconds: float,
    slots: list[tuple[float, int]],
    idle: int,
    goodput: float | None,
    cpu_seconds: float | None,
) -> ModeResult:
    ttfts = sorted(answer.ttft for answer in served)
    tokens = sum(answer.tokens for answer in served)
    return ModeResult(
        mode=mode,
        seconds=seconds,
        steps=len(slots),
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds,
        requests_per_second=len(served) / seconds,
        ttft_median=quantile(ttfts, 0.5),
        ttft_p99=quantile(ttfts, 0.99),
        tpot_median=quantile([answer.tpot for answer in served], 0.5),
        idle_slots=idle / len(slots),
        goodput=goodput,
        cpu_seconds=cpu_seconds,
        slots=slots,
        ttfts=ttfts,
    )


def bench_batching(
    artifact: Path | None = None,
    *,
    num_requests: int = 200,
    max_num_seqs: int = 16,
    rate: float | None = None,
    max_context_len: int = 2048,
    ttft_slo: float | None = None,
    tpot_slo: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Both modes on one ShareGPT-like workload, as plain data.

    `rate`: Poisson arrivals a second; None: all requests are there at the start. With an `artifact` its engine runs
    in real time, with the lengths cut to its context.
    """
    config: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(512, max_num_seqs),
        "enable_prefix_caching": False,
        "ttft_slo": ttft_slo,
        "tpot_slo": tpot_slo,
    }
    results = []
    for mode in MODES:
        progress(f"{mode.replace('_', '-')} batching")
        executor, clock, vocab_size, context = _engine(artifact, max_num_seqs, max_context_len)
        jobs = make_jobs(
            sharegpt_lengths(num_requests, max_context_len=context), rate=rate, vocab_size=min(vocab_size, 1024)
        )
        results.append(asdict(run_mode(mode, jobs, executor, config | {"max_context_len": context}, clock)))
        executor.close()
    return {
        "machine": describe_machine(),
        "engine": "simulated" if artifact is None else str(artifact),
        "num_requests": num_requests,
        "max_num_seqs": max_num_seqs,
        "rate": rate,
        "modes": results,
        "speedup": results[0]["output_tokens_per_second"] / results[1]["output_tokens_per_second"],
    }


def _engine(
    artifact: Path | None, max_num_seqs: int, max_context_len: int
) -> tuple[Executor, Callable[[], float], int, int]:
    """An executor with its cache, its clock, vocabulary and context."""
    if artifact is None:
        clock = SimulatedClock()
        num_blocks = max_num_seqs * max_context_len // 32
        executor = FakeExecutor(num_blocks, cost=step_seconds, wait=clock.wait)
        return executor, clock, executor.vocab_size, max_context_len
    from runtime.artifact import Artifact
    from runtime.executors import open_executor

    opened = Artifact.open(artifact)
    limits = opened.manifest.limits
    executor = open_executor(opened)
    context = min(max_context_len, limits.max_context_len)
    executor.allocate(max_num_seqs * -(-context // executor.kv_layout.block_size))
    return executor, time.monotonic, executor.vocab_size, context


def print_report(report: dict) -> None:
    """The two modes side by side."""
    from rich.console import Console
    from rich.table import Table

    engine = report["engine"]
    arrivals = "all there at the start" if report["rate"] is None else f"{report['rate']:g} a second"
    machine = "" if engine == "simulated" else f", {report['machine']['processor']}"
    table = Table(title=f"{report['num_requests']} ShareGPT-like requests, {arrivals}; engine: {engine}{machine}")
    table.add_column("")
    for row in report["modes"]:
        table.add_column(row["mode"].replace("_", "-"), justify="right")
    for label, name, form in (
        ("output tokens/s", "output_tokens_per_second", "{:.1f}"),
        ("requests/s", "requests_per_second", "{:.2f}"),
        ("TTFT median, s", "ttft_median", "{:.2f}"),
        ("TTFT p99, s", "ttft_p99", "{:.2f}"),
        ("TPOT median, ms", "tpot_median", "{:.1f}"),
        ("idle slots a step while requests wait", "idle_slots", "{:.2f}"),
        ("steps", "steps", "{:,}"),
        ("processor seconds", "cpu_seconds", "{:.0f}"),
        ("requests within the limits", "goodput", "{:.1%}"),
    ):
        values = [row[name] for row in report["modes"]]
        if None not in values:
            scale = 1e3 if name == "tpot_median" else 1
            table.add_row(label, *(form.format(value * scale) for value in values))
    console = Console()
    console.print(table)
    console.print(
        f"in-flight batching gives {report['speedup']:.2f} x the throughput, with {report['max_num_seqs']} slots"
    )


def draw(report: dict) -> str:
    """Sequences in each step over time, and the times to the first token, as an SVG document."""
    svg = Svg(1000, 560)
    modes, slots = report["modes"], report["max_num_seqs"]
    svg.text(
        70, 26, f"{report['num_requests']} requests, {slots} slots, engine: {report['engine']}", size=15, bold=True
    )
    for place, row in enumerate(modes):
        svg.rect(70 + 300 * place, 40, 12, 12, COLOURS[row["mode"]])
        text = f"{row['mode'].replace('_', '-')}: {row['output_tokens_per_second']:.0f} tokens/s"
        svg.text(88 + 300 * place, 50, text, size=12)
    longest = max(row["seconds"] for row in modes)
    for place, row in enumerate(modes):
        top = 70 + 110 * place
        svg.text(64, top + 12, f"{slots} slots", size=10, anchor="end", fill=FAINT)
        points, before = [], 0.0
        for t, count in row["slots"]:
            level = top + 90 - 90 * count / slots
            points += [(70 + 900 * before / longest, level), (70 + 900 * t / longest, level)]
            before = t
        svg.area(points, top + 90, COLOURS[row["mode"]])
        svg.line([(70, top), (970, top)], FAINT, 0.5)
    svg.axis(70, 272, 900, longest, "seconds: sequences in each step")
    slowest = max(row["ttft_p99"] for row in modes) or 1.0
    for row in modes:
        ttfts = row["ttfts"]
        points = [
            (70 + 900 * i / (len(ttfts) - 1 or 1), 520 - 200 * min(1.0, t / slowest)) for i, t in enumerate(ttfts)
        ]
        svg.line(points, COLOURS[row["mode"]], 2)
    svg.text(64, 330, f"{slowest:.1f} s", size=10, anchor="end", fill=FAINT)
    svg.text(64, 520, "0", size=10, anchor="end", fill=FAINT)
    svg.axis(70, 522, 900, 100.0, "per cent of the requests: time to the first token")
    return svg.render()
