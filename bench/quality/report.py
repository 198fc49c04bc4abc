"""`plancast quality`: the figures of one engine or several, as a table, as JSON, and drawn against what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import describe_machine
from bench.quality.reading import Reader
from bench.quality.tasks import fitting_tasks, score
from bench.quality.text import by_position, headline_windows, long_window, read_text, summarize
from bench.report import table_console
from runtime.chart import Axis, Series, chart
from runtime.errors import PlancastError
from runtime.svg import stack

if TYPE_CHECKING:
    from runtime.manifest import Manifest

LONGEST = 2048  # tokens of the long window


def measure_quality(
    artifacts: list[Path],
    against: Path | None,
    *,
    windows: int = 16,
    tasks: bool = True,
    num_threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each artifact, beside the engine of `against` where one is given.

    Raises `PlancastError` where an artifact cannot be opened, or has another vocabulary than the reference.
    """
    entries = []
    for folder in artifacts:
        with Reader(folder, num_threads=num_threads) as engine:
            if against is None:
                entries.append(_measure(engine, None, windows, tasks, progress))
                continue
            with Reader(against, num_threads=num_threads) as reference:
                entries.append(_measure(engine, reference, windows, tasks, progress))
    return {
        "machine": describe_machine(),
        "against": None if against is None else against.name,
        "engines": entries,
    }


def _measure(
    engine: Reader, reference: Reader | None, windows: int, tasks: bool, progress: Callable[[str], None]
) -> dict[str, Any]:
    manifest = engine.manifest
    if reference is not None and reference.executor.vocab_size != engine.executor.vocab_size:
        raise PlancastError(
            f"{engine.artifact.path} has a vocabulary of {engine.executor.vocab_size} tokens, and "
            f"{reference.artifact.path} one of {reference.executor.vocab_size}; compare engines of one model"
        )
    progress(f"{manifest.name}: text")
    entry: dict[str, Any] = describe(manifest)
    entry |= summarize(read_text(engine, reference, headline_windows(engine, windows)))
    progress(f"{manifest.name}: long context")
    longest = LONGEST
    if reference is not None:
        longest = min(longest, reference.manifest.limits.max_context_len)
    (long,) = read_text(engine, reference, [long_window(engine, longest)])
    entry["by_position"] = by_position(long)
    entry["tasks"] = {}
    for task in fitting_tasks(engine) if tasks else []:
        progress(f"{manifest.name}: {task.name}")
        entry["tasks"][task.name] = score(engine, task)
    return entry


def describe(manifest: Manifest) -> dict[str, Any]:
    """What the engine is made of, and what it costs: bytes a weight and bytes a KV token, scales included."""
    weights = manifest.recipe.get("weights") or {}
    scheme = str(weights.get("dtype", "?"))
    group = weights.get("group_size") or (32 if scheme == "int4" else None)
    if scheme in ("int8", "int4", "fp8") and group is not None:
        scheme += f" g{group}" if group != "channel" else " channel"
    if weights.get("method", "rtn") != "rtn":
        scheme += f" {weights['method']}"
    kinds = {(layer.key_dtype, layer.value_dtype) for layer in manifest.kv.layers}
    kv = ", ".join(sorted(key if key == value else f"{key}/{value}" for key, value in kinds))
    return {
        "name": manifest.name,
        "weights": scheme,
        "kv": kv,
        "bytes_per_weight": sum(manifest.weights_bytes.values()) / manifest.model.num_parameters,
        "kv_bytes_per_token": manifest.kv.bytes_per_token,
    }


def print_report(report: dict[str, Any]) -> None:
    """One row an engine."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("engine", "weights", "KV"):
        table.add_column(name, overflow="fold")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("B/weight", lambda e: f"{e['bytes_per_weight']:.2f}"),
        ("B/KV token", lambda e: f"{e['kv_bytes_per_token']:,}"),
        ("perplexity", lambda e: f"{e['perplexity']:.3f}"),
    ]
    if report["against"] is not None:
        columns += [
            ("of ref.", lambda e: f"{e['perplexity'] / e['reference_perplexity']:.3f}"),
            ("mean KL", lambda e: f"{e['mean_kl']:.2e}"),
            ("p99 KL", lambda e: f"{e['p99_kl']:.2e}"),
            ("top-1", lambda e: f"{e['top1_agreement']:.1%}"),
        ]
    for name in dict.fromkeys(task for entry in report["engines"] for task in entry["tasks"]):
        columns.append((name, lambda e, n=name: f"{e['tasks'][n]['solved']:.0%}" if n in e["tasks"] else "-"))
    for name, _ in columns:
        table.add_column(name, justify="right")
    for entry in report["engines"]:
        table.add_row(entry["name"], entry["weights"], entry["kv"], *(show(entry) for _, show in columns))
    console = table_console()
    console.print(table)
    for entry in report["engines"]:
        figure = "mean_kl" if report["against"] is not None else "surprise"
        line = "  ".join(f"{b['position']}: {b[figure]:.3g}" for b in entry["by_position"])
        console.print(
            f"{entry['name']}, {figure.replace('_', ' ')} from position on: {line}", style="dim", soft_wrap=True
        )


def draw(report: dict[str, Any]) -> str:
    """Quality against bytes a weight, against bytes a KV token, and over position, as one SVG document."""
    engines, compared = report["engines"], report["against"] is not None
    figure, label = ("mean_kl", "mean KL, nats a token") if compared else ("perplexity", "perplexity")
    y = Axis(label, log=compared)
    charts = [
        chart(
            title,
            Axis(axis),
            y,
            [Series(entry["name"], [(entry[key], entry[figure])], line=False) for entry in engines],
        )
        for title, axis, key in (
            ("Quality and the weights' size", "bytes a weight, scales included", "bytes_per_weight"),
            ("Quality and the KV cache's size", "bytes a token, scales included", "kv_bytes_per_token"),
        )
    ]
    over = "mean_kl" if compared else "surprise"
    lines = [
        Series(entry["name"], [(bucket["position"], bucket[over]) for bucket in entry["by_position"]])
        for entry in engines
    ]
    name = "mean KL, nats a token" if compared else "surprise, nats a token"
    charts.append(chart("Over the context", Axis("position"), Axis(name, log=compared), lines))
    return stack(charts)
