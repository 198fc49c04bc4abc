"""`plancast bench speculation`: plain decoding against each proposer, in interleaved rounds of one run.

Prompts are read (into the prefix cache) before anything is timed: what is measured is writing. One request's ratio is
of two runs that follow each other, with all that the engine does. With more requests, where there is little to gain or
to lose, the engines step by turns (`bench.turns`), and their steps alone are timed. The median over the rounds is
reported, of the wall clock and of the processor's time, which a busy machine disturbs less.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.turns import Played, play_by_turns
from runtime.engine_core import EngineCore
from runtime.engine_process import open_engine
from runtime.errors import PlancastError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams
from runtime.svg import FAINT, Svg

_Prompt = dict[str, Any]
_Run = Callable[[list[list[_Prompt]], SamplingParams], dict[str, Played]]

PLAIN = "plain"
_WORDS_A_PART = 350
_COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444")


@dataclass(slots=True)
class Cell:
    """One proposer on one workload, at one temperature and number of requests. Ratios are to plain decoding."""

    workload: str
    temperature: float
    requests: int
    method: str
    tokens_per_second: float = 0.0
    ratio: float = 1.0
    cpu_ratio: float = 1.0
    acceptance: float | None = None  # share of drafted tokens
    acceptance_length: float | None = None  # tokens a verification brings
    draft_share: float = 0.0  # of the time
    identical: int = 0  # answers that are plain decoding's, token for token
    answers: int = 0
    ratios: list[float] = field(default_factory=list)


def load_prompts() -> dict[str, list[str]]:
    """The prompts that ship with the repository, by workload."""
    import yaml

    words = resources.files("builder").joinpath("parity_text.txt").read_text().split(" ")
    parts = [" ".join(words[at : at + _WORDS_A_PART]) for at in range(0, len(words), _WORDS_A_PART)]
    raw = yaml.safe_load(resources.files("bench").joinpath("speculation_prompts.yaml").read_text())
    filled = {}
    for workload, prompts in raw.items():
        for number, part in enumerate(parts):
            prompts = [prompt.replace(f"{{text:{number}}}", part) for prompt in prompts]
        filled[workload] = prompts
    return filled


def bench_speculation(
    artifact: Path,
    methods: Sequence[str],
    *,
    draft: str | None,
    workloads: Sequence[str],
    temperatures: Sequence[float],
    requests: Sequence[int],
    max_tokens: int,
    rounds: int,
    num_threads: int | None,
    progress: Callable[[str], None] = lambda _: None,
    on_report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure. `methods` are speculative configs as the command line takes them, by their short names.

    `on_report`: gets what was measured so far, each time that there is more.

    Raises `PlancastError` for a workload that there is not.
    """
    prompts = load_prompts()
    for name in workloads:
        if name not in prompts:
            raise PlancastError(f"no workload {name!r}; there are {', '.join(prompts)}")
    options: dict[str, Any] = {"kv_cache_memory": "512MiB", "max_num_seqs": max(requests), "num_threads": num_threads}
    cells: list[Cell] = []

    def report() -> dict[str, Any]:
        return {
            "machine": describe_machine(),
            "artifact": str(artifact.name),
            "draft": draft,
            "max_tokens": max_tokens,
            "rounds": rounds,
            "cells": [asdict(cell) for cell in cells],
        }

    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        cores: dict[str, EngineCore] = {}
        order = random.Random(0)
        for method in (PLAIN, *methods):
            progress(f"{method}: loading")
            config: Any = "off" if method == PLAIN else method
            if "draft_model" in method:
                config = {"method": method, "model": draft}
            engines[method] = stack.enter_context(LLM(artifact, speculative_config=config, **options))
            if max(requests) > 1:
                opened = open_engine(engines[method].engine_spec)
                stack.callback(opened.close)
                cores[method] = opened.core
        for workload in workloads or prompts:
            for temperature in temperatures:
                for count in requests:
                    progress(f"{workload}, temperature {temperature:g}, {count} requests")
                    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
                    run: _Run = partial(_alone, engines) if count == 1 else partial(_by_turns, cores, order)
                    conversations = [[{"role": "user", "content": text}] for text in prompts[workload]]
                    batches = _batches([engines[PLAIN].chat_prompt(each) for each in conversations], count)
                    counted = engines if count == 1 else cores
                    before = {method: counted[method].stats() for method in counted}
                    measured = [Cell(workload, temperature, count, method) for method in engines]
                    _measure(measured, [run(batches, params) for _ in range(rounds + 1)])
                    for cell in measured:
                        _add_drafting(cell, before[cell.method], counted[cell.method].stats())
                    cells += measured
                    on_report(report())
    return report()


def default_methods(artifact: Path) -> list[str]:
    """What an artifact can draft with by itself: look-ups; its head, where it has one, alone and after a look-up."""
    from runtime.artifact import read_manifest

    head = ["eagle", "ngram+eagle"] if read_manifest(artifact).draft_head is not None else []
    return ["ngram", "suffix", *head]


def _measure(cells: list[Cell], rounds: list[dict[str, Played]]) -> None:
    """Note in each method's cell what the rounds say; the first one reads the prompts, and teaches the engines what
    steps cost."""
    for cell in cells:
        pairs = [(played[PLAIN], played[cell.method]) for played in rounds[1:]]
        cell.tokens_per_second = statistics.median(own.num_tokens / own.seconds for _, own in pairs)
        cell.ratios = [_times(plain.seconds, plain, own.seconds, own) for plain, own in pairs]
        cell.ratio = statistics.median(cell.ratios)
        cell.cpu_ratio = statistics.median(
            _times(plain.cpu_seconds, plain, own.cpu_seconds, own) for plain, own in pairs
        )
        cell.answers = len(pairs[-1][1].answers)
        cell.identical = sum(a == b for a, b in zip(pairs[-1][1].answers, pairs[-1][0].answers, strict=True))


def _times(plain_seconds: float, plain: Played, own_seconds: float, own: Played) -> float:
    """How many times as many tokens a second."""
    return plain_seconds / plain.num_tokens / (own_seconds / own.num_tokens)


def _batches(prompts: list[_Prompt], count: int) -> list[list[_Prompt]]:
    """All prompts, `count` at a time; where there are fewer, they repeat."""
    total = -(-len(prompts) // count) * count
    listed = [prompts[i % len(prompts)] for i in range(total)]
    return [listed[at : at + count] for at in range(0, total, count)]


def _alone(engines: dict[str, LLM], batches: list[list[_Prompt]], params: SamplingParams) -> dict[str, Played]:
    """One engine after another, with all that it does."""
    rounds: dict[str, Played] = {}
    for method, engine in engines.items():
        wall, cpu = time.perf_counter(), time.process_time()
        results = [result for batch in batches for result in engine.generate(batch, params)]
        answers = [list(result.outputs[0].token_ids) for result in results]
        rounds[method] = Played(answers, time.perf_counter() - wall, time.process_time() - cpu)
    return rounds


def _by_turns(
    cores: dict[str, EngineCore], order: random.Random, batches: list[list[_Prompt]], params: SamplingParams
) -> dict[str, Played]:
    rounds = [play_by_turns(cores, [each["prompt_token_ids"] for each in batch], params, order) for batch in batches]
    return {
        method: Played(
            [answer for played in rounds for answer in played[method].answers],
            sum(played[method].seconds for played in rounds),
            sum(played[method].cpu_seconds for played in rounds),
        )
        for method in cores
    }


def _add_drafting(cell: Cell, before: Any, after: Any) -> None:
    drafts = after.spec_decode_num_drafts - before.spec_decode_num_drafts
    drafted = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    if drafts:
        cell.acceptance, cell.acceptance_length = accepted / drafted, 1 + accepted / drafts
    seconds = after.step_seconds - before.step_seconds
    cell.draft_share = (after.spec_decode_draft_seconds - before.spec_decode_draft_seconds) / max(seconds, 1e-9)


def print_report(report: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['artifact']}, {report['machine']['processor']}, {report['rounds']} rounds")
    for name in ("workload", "temp.", "requests", "method", "tokens/s", "x plain"):
        table.add_column(
            name, justify="left" if name in ("workload", "method") else "right", no_wrap=name in ("method", "x plain")
        )
    for name in ("accepted", "length", "drafting", "same text"):
        table.add_column(name, justify="right")
    for cell in report["cells"]:
        length = cell["acceptance_length"]
        table.add_row(
            cell["workload"],
            f"{cell['temperature']:g}",
            str(cell["requests"]),
            cell["method"][:24],
            f"{cell['tokens_per_second']:.1f}",
            f"{cell['ratio']:.2f}",
            "" if cell["acceptance"] is None else f"{cell['acceptance']:.0%}",
            "" if length is None else f"{length:.2f}",
            f"{cell['draft_share']:.1%}",
            f"{cell['identical']}/{cell['answers']}",
        )
    Console().print(table)


def draw(report: dict[str, Any]) -> str:
    """Bars of speed over plain decoding, by workload, for each temperature and number of requests, as an SVG."""
    cells = [cell for cell in report["cells"] if cell["method"] != PLAIN]
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    panels = list(dict.fromkeys((cell["temperature"], cell["requests"]) for cell in cells))
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    most = max(2.0, *(cell["ratio"] for cell in cells)) if cells else 2.0
    svg = Svg(1000, 80 + 190 * len(panels))
    svg.text(70, 26, f"Speed over plain decoding: {report['artifact']}", size=15, bold=True)
    for place, method in enumerate(methods):
        svg.rect(70 + 180 * place, 40, 12, 12, _COLOURS[place % len(_COLOURS)])
        svg.text(88 + 180 * place, 50, method, size=12)
    for row, (temperature, requests) in enumerate(panels):
        base = 220 + 190 * row
        svg.text(70, base - 145, f"temperature {temperature:g}, {requests} requests", size=12, bold=True)
        for level in (1.0, 2.0):
            height = base - 130 * level / most
            svg.line([(70, height), (970, height)], FAINT, 0.7)
            svg.text(64, height + 4, f"{level:g} x", size=10, anchor="end", fill=FAINT)
        width = 900 / max(1, len(workloads))
        for column, workload in enumerate(workloads):
            svg.text(70 + width * (column + 0.5), base + 14, workload, size=11, anchor="middle")
            for place, method in enumerate(methods):
                for cell in cells:
                    key = (cell["temperature"], cell["requests"], cell["workload"], cell["method"])
                    if key == (temperature, requests, workload, method):
                        x = 80 + width * column + (width - 30) * place / len(methods)
                        height = 130 * cell["ratio"] / most
                        bar = (width - 40) / len(methods)
                        colour = _COLOURS[place % len(_COLOURS)]
                        svg.rect(x, base - height, bar, height, colour, f"{method}: {cell['ratio']:.2f} x")
                        svg.text(x + bar / 2, base - height - 3, f"{cell['ratio']:.2f}", size=10, anchor="middle")
        svg.line([(70, base), (970, base)], FAINT, 1)
    return svg.render()
