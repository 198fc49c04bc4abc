"""Reports for people: a table in the terminal, and one HTML file with plots that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from bench.serving.charts import line_chart
from bench.serving.metrics import LATENCIES

_STYLE = """
body { font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 1520px;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
figure { display: inline-block; margin: 1rem 1rem 0 0; max-width: 100%; }
figure svg { max-width: 100%; height: auto; border: 1px solid #e5e7eb; border-radius: 8px; }
.wide { overflow-x: auto; }
.muted { color: #6b7280; }
"""


# What runs may differ in: how it is called, and its unit.
_SWEPT = {
    "max_concurrency": ("concurrency", "requests at a time"),
    "request_rate": ("request rate", "requests/s"),
    "input_tokens": ("prompt length", "tokens in"),
}


def rows_of(runs: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The table: a figure's name, and its value in each run."""
    names = [
        ("requests completed", "completed", "{:.0f}"),
        ("requests failed", "failed", "{:.0f}"),
        ("seconds", "duration", "{:.1f}"),
        ("input tokens", "total_input_tokens", "{:.0f}"),
        ("output tokens", "total_output_tokens", "{:.0f}"),
        ("requests/s", "request_throughput", "{:.2f}"),
        ("goodput, requests/s", "request_goodput", "{:.2f}"),
        ("output tokens/s", "output_throughput", "{:.1f}"),
        ("all tokens/s", "total_token_throughput", "{:.1f}"),
        ("most requests at once", "max_concurrent_requests", "{:.0f}"),
    ]
    for name in LATENCIES:
        for kind in ("mean", "median", "p99"):
            names.append((f"{kind} {name.upper()}, ms", f"{kind}_{name}_ms", "{:.1f}"))
    return [
        (label, [_written(run[key], form) if key in run else "" for run in runs])
        for label, key, form in names
        if any(key in run for run in runs)
    ]


def _written(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def print_runs(report: dict[str, Any]) -> None:
    """The table on stdout; what failed on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model_id']} at {report['target']}", title_justify="left")
    table.add_column("")
    for run in report["runs"]:
        table.add_column(run["load"], justify="right")
    for label, values in rows_of(report["runs"]):
        table.add_row(label, *values)
    Console().print(table)
    for run in report["runs"]:
        for error, count in run["errors"].items():
            Console(stderr=True).print(f"{run['load']}: {count} x {error}", markup=False)


def html_report(report: dict[str, Any]) -> str:
    """The report as one HTML file."""
    runs, machine = report["runs"], report["machine"]
    head = "".join(f"<th>{escape(run['load'])}</th>" for run in runs)
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows_of(runs)
    )
    title = f"{report['model_id']}: serving"
    facts = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['date']}; target {report['target']}; "
        f"{report['workload']}; seed {report['seed']}"
    )
    return _page(
        title, facts, f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div>', _charts(report)
    )


def _charts(report: dict[str, Any]) -> list[str]:
    runs = report["runs"]
    charts = []
    for key, (what, unit) in _SWEPT.items():
        if len({run[key] for run in runs if run[key]}) > 1:
            charts.append(_sweep(runs, key, f"Throughput against {what}", unit, "output_throughput", "output tokens/s"))
            charts.append(_sweep(runs, key, f"Median TTFT against {what}", unit, "median_ttft_ms", "ms"))
            charts.append(_sweep(runs, key, f"Median TPOT against {what}", unit, "median_tpot_ms", "ms"))
    for name, text in LATENCIES.items():
        series = {
            run["load"]: [(value, 100 * share / (len(points) - 1)) for share, value in enumerate(points)]
            for run in runs
            if (points := run["cdf_ms"].get(name))
        }
        if series:
            charts.append(line_chart(f"{text.capitalize()}, cumulative", series, "ms", "per cent"))
    for run in runs:
        times = run["timeline"]["seconds"]
        for key, label in (("tokens_per_second", "output tokens/s"), ("running", "requests under way")):
            points = list(zip(times, run["timeline"][key], strict=True))
            charts.append(line_chart(f"{run['load']}: {label}", {label: points}, "seconds", label, filled=True))
    if report["steps"]:
        begin = report["steps"][0][0]
        together = [(t - begin, decode + prefill) for t, decode, prefill, _ in report["steps"]]
        decodes = [(t - begin, decode) for t, decode, _, _ in report["steps"]]
        series = {"prefill": together, "decode": decodes}
        charts.append(line_chart("Tokens in each step of the engine", series, "seconds", "tokens", filled=True))
        spans = {"a step": [(t - begin, ms) for t, _, _, ms in report["steps"]]}
        charts.append(line_chart("Time of each step", spans, "seconds", "ms"))
    return charts


def _sweep(runs: list[dict[str, Any]], key: str, title: str, unit: str, figure: str, label: str) -> str:
    """A figure against what was swept; one line for runs that differ in nothing else."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in sorted((run for run in runs if run[key]), key=lambda run: run[key]):
        others = [f"{run[other]:g} {text}" for other, (_, text) in _SWEPT.items() if other != key and run[other]]
        if run[figure] is not None:
            lines.setdefault(", ".join(others), []).append((run[key], run[figure]))
    return line_chart(title, lines, unit, label, log_x=key != "request_rate")


def _page(title: str, facts: str, table: str, charts: list[str]) -> str:
    figures = "".join(f"<figure>{chart}</figure>" for chart in charts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="muted">{escape(facts)}</p>{table}{figures}</body></html>\n'
    )


def print_figures(report: dict[str, Any]) -> None:
    """The figures of `bench throughput` or `bench latency` on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model_id']}: {report['kind']}", title_justify="left", show_header=False)
    for name, value in report["figures"].items():
        table.add_row(name.replace("_", " "), _plain(value))
    Console().print(table)


def html_offline(report: dict[str, Any]) -> str:
    """`bench throughput` and `bench latency` as one HTML file."""
    machine = report["machine"]
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_plain(value))}</td></tr>"
        for name, value in report["figures"].items()
    )
    facts = f"{machine['processor']}, {machine['cores']} cores, {machine['date']}; {report['workload']}"
    charts = [
        line_chart(name, {what: list(enumerate(values, 1))}, x_label, unit)
        for name, what, values, x_label, unit in report["series"]
    ]
    return _page(f"{report['model_id']}: {report['kind']}", facts, f"<table>{rows}</table>", charts)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k}: {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else str(value)
