"""`plancast trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("trace")(trace)


def trace(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="An iteration log (`--iteration-log LOG`).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.svg|.html", help="Draw requests and KV cache over time.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures here.")
    ] = None,
) -> None:
    """Say what the scheduler did: figures, a picture of requests over time, a trace for Perfetto."""
    from runtime.errors import PlancastError
    from runtime.iteration_log import read_log
    from runtime.trace_chrome import chrome_trace
    from runtime.trace_picture import draw, draw_page
    from runtime.trace_view import build_trace, format_figure, summarize

    if out is not None and out.suffix not in (".svg", ".html"):
        raise PlancastError(f"--out {out}: give a file that ends in .svg or .html")
    view = build_trace(*read_log(str(log)))
    if not view.steps:
        raise PlancastError(f"{log} holds no step yet: nothing ran, or nothing was written out so far")
    figures = summarize(view)
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):26s} {format_figure(value):>14s}")
    if out is not None:
        _write(out, draw(view) if out.suffix == ".svg" else draw_page(view))
    if chrome is not None:
        _write_json(chrome, chrome_trace(view))
    if json_file is not None:
        _write_json(json_file, figures)


def _write_json(path: Path, value: object) -> None:
    import json

    _write(path, json.dumps(value))


def _write(path: Path, text: str) -> None:
    from runtime.errors import PlancastError

    try:
        path.write_text(text)
    except OSError as error:
        raise PlancastError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}")
