"""`plancast bench prefix`: what a second request with a shared prefix waits for its first token, on a real engine.

Each round takes a prompt that nobody has sent before, then one that shares its first tokens: the first is computed
whole, the second from the prefix cache. `swap=True` evicts the shared blocks in between, and the swap file brings them
back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.core_workloads import Job, play, quantile
from bench.machine import describe_machine
from runtime.artifact import Artifact
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.executors import open_executor

_VOCAB = 1024  # random ids below this: every vocabulary has them


@dataclass(slots=True)
class PrefillCost:
    """One prompt's prefill: seconds to the first token, processor seconds of all threads, tokens computed."""

    ttft: float
    cpu: float
    computed: int


def bench_prefix(
    artifact: Path,
    *,
    shared_tokens: int = 1000,
    own_tokens: int = 16,
    rounds: int = 5,
    swap: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Medians over `rounds` pairs of prompts, as plain data; `saved` are shares of the first prompt's cost."""
    opened = Artifact.open(artifact)
    executor = open_executor(opened)
    length = shared_tokens + own_tokens
    size = executor.kv_layout.block_size
    # With `swap` one prompt fills the pool: the next one evicts it.
    executor.allocate((1 if swap else 4) * -(-(length + 2) // size) + 1)
    config = EngineConfig(
        max_context_len=length + 2,
        max_num_seqs=1,
        max_num_batched_tokens=opened.manifest.limits.max_num_batched_tokens,
        swap_cached_blocks=swap,
    )
    core = EngineCore(executor, config)
    rng = np.random.default_rng(0)

    def prompt(shared: list[int]) -> list[int]:
        return shared + rng.integers(0, _VOCAB, own_tokens).tolist()

    def fresh() -> list[int]:
        return rng.integers(0, _VOCAB, shared_tokens).tolist()

    _prefill(core, prompt(fresh()))  # what the first pass of all costs is not the prompt's
    first, second = [], []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        shared = fresh()
        first.append(_prefill(core, prompt(shared)))
        if swap:
            _prefill(core, prompt(fresh()))
        second.append(_prefill(core, prompt(shared)))
    stats = core.stats()
    core.close()
    executor.close()
    whole, rest = _median(first), _median(second)
    return {
        "machine": describe_machine(),
        "artifact": opened.manifest.name,
        "shared_tokens": shared_tokens,
        "own_tokens": own_tokens,
        "rounds": rounds,
        "from": "swap file" if swap else "pool",
        "restored_blocks": stats.restored_blocks,
        "first": asdict(whole),
        "second": asdict(rest),
        "saved": {name: 1 - getattr(rest, name) / getattr(whole, name) for name in ("ttft", "cpu", "computed")},
    }


def _prefill(core: EngineCore, prompt: list[int]) -> PrefillCost:
    hits, cpu = core.stats().prefix_cache_hits, time.process_time()
    (served,) = play(core, [Job(0.0, prompt, 1)])
    computed = len(prompt) - (core.stats().prefix_cache_hits - hits)
    return PrefillCost(served.ttft, time.process_time() - cpu, computed)


def _median(costs: list[PrefillCost]) -> PrefillCost:
    ttft, cpu, computed = (
        quantile([getattr(cost, name) for cost in costs], 0.5) for name in ("ttft", "cpu", "computed")
    )
    return PrefillCost(ttft, cpu, int(computed))


def print_report(report: dict[str, Any]) -> None:
    """First prompt, second prompt, and what is saved."""
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    table = Table(
        title=f"{report['shared_tokens']} tokens in common, {report['own_tokens']} of its own, cached in the "
        f"{report['from']}; {report['artifact']}, {machine['processor']}, {machine['date']}"
    )
    for title in ("median of " + str(report["rounds"]), "first prompt", "second prompt", "saved"):
        table.add_column(title, justify="right")
    for label, name, form in (
        ("TTFT, s", "ttft", "{:.3f}"),
        ("processor seconds", "cpu", "{:.3f}"),
        ("tokens computed", "computed", "{:d}"),
    ):
        table.add_row(
            label,
            form.format(report["first"][name]),
            form.format(report["second"][name]),
            f"{report['saved'][name]:.1%}",
        )
    Console().print(table)
