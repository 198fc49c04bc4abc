"""`plancast bench scaling`: how an engine's speed goes with the length of the context and the number of requests."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe_machine, machine_name
from bench.peers.peer import HERE
from bench.peers.rounds import measure
from bench.peers.workers import Worker
from bench.prompts import prompts_of_length
from bench.serving.charts import line_chart
from runtime.artifact import read_manifest
from runtime.errors import PlancastError
from runtime.svg import stack

# Of a prompt, where the number of requests is what varies.
PROMPT_TOKENS = 128


def bench_scaling(
    artifact: Path,
    *,
    contexts: Sequence[int],
    requests: Sequence[int],
    output_tokens: int = 32,
    rounds: int = 3,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One request at each length of context (tokens of its prompt), then each number of requests at 128 tokens.

    Returns machine, artifact and a row each (see `bench.peers.rounds.Row`; `sweep` says of which kind it is). Raises
    `PlancastError` where the engine takes no such requests.
    """
    from runtime.tokenizer import Tokenizer

    manifest = read_manifest(artifact)
    limits = manifest.limits
    if max(contexts) + output_tokens > limits.max_context_len:
        raise PlancastError(
            f"{artifact} takes {limits.max_context_len} tokens a request, {max(contexts)} + {output_tokens} are asked"
            f" for; shorten --context, or build it with --set limits.max_context_len={max(contexts) + output_tokens}"
        )
    tokenizer = Tokenizer.load(artifact)
    cells = max(max(contexts) + output_tokens, max(requests) * (PROMPT_TOKENS + output_tokens))
    config = {
        "artifact": str(artifact.resolve()),
        "threads": threads or len(os.sched_getaffinity(0)),
        "max_num_seqs": max(requests),
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_memory": max(1 << 30, 2 * cells * manifest.kv.bytes_per_token),
    }
    cases = [("context", 1, length) for length in contexts] + [("requests", n, PROMPT_TOKENS) for n in requests]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="plancast-scaling-") as folder:
        script = HERE / "worker_plancast.py"
        with Worker(manifest.name, Path(sys.executable), script, config, Path(folder) / "log") as worker:
            for sweep, count, length in cases:
                progress(f"{count} x {length} tokens in, {output_tokens} out")
                prompts = prompts_of_length(tokenizer.encode, [length] * count)
                row = measure([worker], prompts, output_tokens, rounds)[0]
                rows.append({"sweep": sweep, **row.report()})
    return {
        "machine": describe_machine(),
        "artifact": manifest.name,
        "weights": manifest.recipe["weights"]["dtype"],
        "kv": manifest.recipe["kv"]["key"],
        "threads": config["threads"],
        "rows": rows,
    }


def print_report(report: dict[str, Any]) -> None:
    """The rows as a table."""
    from rich.console import Console
    from rich.table import Table

    place = f"{report['threads']} threads of {machine_name(report['machine'])}"
    table = Table(title=f"{_engine(report)}, {place}", title_justify="left")
    for name in ("requests", "tokens in", "decode tokens/s", "ms a token", "prefill tokens/s"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        decode = row["decode_median"]
        table.add_row(
            str(row["requests"]),
            str(row["prompt_tokens"]),
            "-" if decode is None else f"{decode:.1f}",
            "-" if decode is None else f"{1000 * row['requests'] / decode:.2f}",
            f"{row['prefill_median']:.0f}",
        )
    Console().print(table)


def draw(report: dict[str, Any]) -> str:
    """Charts one above the other, as SVG: decode and prefill over the context, and over the requests."""
    place = f"{report['threads']} threads of {machine_name(report['machine'])}"
    charts = []
    for sweep, key, label in (("context", "prompt_tokens", "tokens of context"), ("requests", "requests", "requests")):
        rows = [row for row in report["rows"] if row["sweep"] == sweep]
        for figure in ("decode", "prefill"):
            points = [(row[key], row[f"{figure}_median"]) for row in rows if row[f"{figure}_median"] is not None]
            title = f"{figure.capitalize()}, {place}"
            charts.append(line_chart(title, {_engine(report): points}, label, "tokens/s", log_x=True))
    return stack(charts)


def _engine(report: dict[str, Any]) -> str:
    return f"{report['artifact']} ({report['weights']} weights, {report['kv']} KV)"
