"""`plancast build | inspect | verify | refit`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from builder.build import BuildPlan, BuildResult
    from builder.progress import BuildProgress

_Artifact = Annotated[Path, typer.Argument(help="An artifact's folder.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("build")(build)
    app.command("inspect")(inspect)
    app.command("verify")(verify)
    app.command("refit")(refit)


def build(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (`plancast recipes`), or a YAML file.")],
    out: Annotated[Path | None, typer.Option(help="Where to put it. Default: artifacts/NAME.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
    strip_weights: Annotated[
        bool,
        typer.Option("--strip-weights", help="Leave the weights out of NVIDIA engines; `plancast refit` puts them in."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build anew, and replace whatever engine is there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it takes; write nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: _Json = False,
) -> None:
    """Build an engine: pull, trace, fuse, quantize, compile, compare with the original."""
    from builder import build as builder
    from builder.progress import make_progress
    from builder.recipe import load_recipe

    if strip_weights:
        overrides = [*(overrides or []), "backend.strip_weights=true"]
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        plan = builder.plan_build(loaded, out, force=force)
        print(json.dumps(_plan_dict(plan), indent=2)) if as_json else _print_plan(plan)
        return
    progress = make_progress(quiet=quiet)
    try:
        with _ending_on_signals(progress):
            result = builder.run_build(loaded, out, force=force, progress=progress)
    except KeyboardInterrupt:
        _leave("interrupted: nothing half-built is left", 130)
    except SystemExit as signalled:
        _leave("terminated: nothing half-built is left", int(signalled.code or 1))
    print(json.dumps(_result_dict(result), indent=2)) if as_json else _print_result(result)


def inspect(
    artifact: _Artifact,
    as_json: _Json = False,
    graph: Annotated[
        Path | None, typer.Option(help="Draw one layer before and after fusion into this SVG file.")
    ] = None,
) -> None:
    """Show what an artifact is: model, backend, operators, bytes, limits, parity."""
    from builder import inspect as inspection

    if graph is not None:
        from builder.graph_svg import draw
        from runtime.errors import ArtifactError

        graphs = inspection.load_graphs(artifact)
        title = f"{inspection.describe(artifact)['name']}: decoder layer {graphs.traced.layer}"
        try:
            graph.write_text(draw(graphs, title), encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"{graph}: cannot be written ({error.strerror})") from None
        print(f"wrote {graph}", file=sys.stderr)
        if not as_json:
            return
    if as_json:
        print(json.dumps(inspection.describe(artifact), indent=2))
        return
    from rich.console import Console

    inspection.show(artifact, Console())


def refit(
    artifact: _Artifact,
    model: Annotated[str | None, typer.Option(help="Where the model lies now. Default: as in the recipe.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Put the weights back into an artifact that was built with --strip-weights."""
    from builder.progress import make_progress
    from builder.refit import refit as put_back
    from runtime.memory import format_size

    manifest = put_back(artifact, model=model, progress=make_progress(quiet=quiet))
    print(f"{artifact} ({format_size(sum(info.bytes for info in manifest.files.values()))}, with its weights)")


def verify(artifact: _Artifact, as_json: _Json = False) -> None:
    """Check every byte of an artifact, and that it loads with what is installed here."""
    from runtime.artifact import Artifact, unlisted_files
    from runtime.memory import format_size

    found = Artifact.open(artifact, verify="full")
    extra = unlisted_files(found.path, found.manifest)
    nbytes = sum(info.bytes for info in found.manifest.files.values())
    if as_json:
        value = {"path": str(found.path), "ok": True, "files": len(found.manifest.files), "bytes": nbytes}
        print(json.dumps({**value, "notes": list(found.notes), "unlisted": extra}, indent=2))
        return
    print(f"{found.path}: whole; {len(found.manifest.files)} files, {format_size(nbytes)}, every SHA-256 as written")
    for note in found.notes:
        print(f"note: {note}")
    for name in extra:
        print(f"note: {name} does not belong to the artifact")


@contextlib.contextmanager
def _ending_on_signals(progress: BuildProgress) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP unwind the build, so that it cleans up. Exit code 128 + the signal."""

    def end(number: int, _: Any) -> None:
        progress.interruption = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise progress.interruption

    def say_unless_interrupted(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            sys.__unraisablehook__(unraisable)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    hook, sys.unraisablehook = sys.unraisablehook, say_unless_interrupted
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(message: str, code: int) -> NoReturn:
    """End the process now. Python would wait for threads first, and for ever on a pool's that the signal caught at
    their start: they are not yet on the list of those to be told that it is over."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _result_dict(result: BuildResult) -> dict[str, Any]:
    import msgspec

    manifest = result.manifest
    return {
        "name": manifest.name,
        "path": str(result.path),
        "cached": result.cached,
        "build": manifest.build,
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "parity": msgspec.to_builtins(manifest.parity),
    }


def _print_result(result: BuildResult) -> None:
    from runtime.memory import format_size

    nbytes = sum(info.bytes for info in result.manifest.files.values())
    print(f"{result.path} ({format_size(nbytes)}{', from the build cache' if result.cached else ''})")
    print(f"next: plancast generate {result.path} --chat 'Hello!'   or: plancast serve {result.path}")


def _plan_dict(plan: BuildPlan) -> dict[str, Any]:
    return {
        "name": plan.recipe.name,
        "out": str(plan.out),
        "source": plan.source,
        "pulled": plan.pulled,
        "cached": plan.cached,
        "memory": plan.estimate.memory,
        "disk": plan.estimate.disk,
        "seconds": plan.estimate.seconds,
    }


def _print_plan(plan: BuildPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    from runtime.memory import format_size

    console = Console()
    cost = plan.estimate
    console.print(f"{plan.recipe.name} -> {plan.out}", markup=False, highlight=False)
    state = "on disk" if plan.pulled else "to be pulled"
    console.print(f"model: {plan.recipe.model}, {state}, from {plan.source}", markup=False, highlight=False)
    if plan.cached:
        console.print("the engine lies in the build cache: it is linked, which takes a second and no memory")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("memory", justify="right")
    for stage, memory in cost.memory.items():
        table.add_row(stage, f"~{cost.seconds[stage]:.0f} s", f"~{format_size(memory)}")
    table.add_row("in all", f"~{cost.total_seconds:.0f} s", f"~{format_size(cost.peak_memory)}", style="bold")
    console.print(table)
    disk = ", ".join(f"{name} {format_size(size)}" for name, size in cost.disk.items())
    console.print(f"disk: ~{format_size(cost.total_disk)} ({disk})", markup=False, highlight=False)
