"""Every weight scheme and KV format of one recipe, built and measured: `python -m bench.quality.sweep --json FILE`.

Weights are measured with an f16 KV cache, KV formats with f32 weights, all against the same model in f32. Engines that
lie in `--folder` already are not built again; those that take long to calibrate come last, `--only` picks some, and
`--keep` goes on with a sweep that was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from bench.quality.report import draw, measure_quality, print_report
from bench.report import check_targets, run_script, status, write_json
from builder.build import run_build
from builder.recipe import load_recipe
from runtime.errors import PlancastError
from runtime.manifest import MANIFEST_NAME

REFERENCE = "f32"
_EXACT = ("weights=f32",)
_FINE = ("backend.dynamic_quantization_group_size=0",)  # activations of 12 to 15 bits
VARIANTS: dict[str, tuple[str, ...]] = {
    REFERENCE: (*_EXACT, "kv=f32"),
    "kv-f16": (*_EXACT, "kv=f16"),
    "kv-int8": (*_EXACT, "kv=int8"),
    "kv-fp8_e4m3": (*_EXACT, "kv=fp8_e4m3"),
    "kv-fp8_e4m3-static": (*_EXACT, "kv=fp8_e4m3", "kv.scales=static"),
    "kv-fp8_e5m2": (*_EXACT, "kv=fp8_e5m2"),
    "kv-int4-rotated": (*_EXACT, "kv=int4", "kv.rotate=both"),
    "kv-int4": (*_EXACT, "kv=int4"),
    "kv-int8-int4": (*_EXACT, "kv.key=int8", "kv.value=int4"),
    "bf16": ("weights=bf16",),
    "int8": ("weights=int8", *_FINE),
    "int8-g32": ("weights=int8", "weights.group_size=32", *_FINE),
    "int8-g32-a8": ("weights=int8", "weights.group_size=32", "backend.dynamic_quantization_group_size=32"),
    "fp8": ("weights=fp8",),
    "checkpoint": ("weights=checkpoint",),
    "int4-rtn": ("weights=int4",),
    "int8-smooth": ("weights=int8", "weights.smooth=0.5", "backend.dynamic_quantization_group_size=32"),
    "int4-gptq": ("weights=int4", "weights.method=gptq"),
    "int4-gptq-mixed": ("weights=int4", "weights.method=gptq", "weights.mixed.max_bits=5"),
    "int4-awq": ("weights=int4", "weights.method=awq"),
    "int4-awq-gptq": ("weights=int4", "weights.method=awq+gptq"),
}


def build_variants(
    recipe: str,
    names: Sequence[str],
    folder: Path,
    *,
    variants: Mapping[str, Sequence[str]] = VARIANTS,
    overrides: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Build the named variants of `recipe` into `folder` and return their folders, the reference's first.

    Raises `PlancastError` for a name that is no variant, or a build that cannot be made.
    """
    _check(names, variants)
    built = []
    for name in dict.fromkeys([REFERENCE, *names]):
        built.append(folder / name)
        if not (folder / name / MANIFEST_NAME).is_file():
            progress(f"{name}: build")
            own = [f"name={name}", "parity.enabled=false", "draft_head=null", *variants[name], *overrides]
            run_build(load_recipe(recipe, own), folder / name)
    return built


def _check(names: Sequence[str], variants: Mapping[str, Sequence[str]]) -> None:
    unknown = sorted(set(names) - set(variants))
    if unknown:
        raise PlancastError(f"no variant is called {', '.join(unknown)}; there are: {', '.join(variants)}")


def _read(json_file: Path | None) -> dict[str, Any]:
    if json_file is None or not json_file.is_file():
        return {}
    try:
        report = json.loads(json_file.read_text(encoding="utf-8"))
        if report["against"] == REFERENCE and all(isinstance(entry["name"], str) for entry in report["engines"]):
            return report
    except (ValueError, KeyError, TypeError):
        pass
    raise PlancastError(f"{json_file} is no report of a sweep; name another file, or leave --keep out")


def main(
    recipe: str = typer.Argument("smollm2-135m-cpu"),
    only: list[str] = typer.Option([], help="A variant; repeat for several. All without it."),
    folder: Path = typer.Option(Path("artifacts/quality"), help="Where the engines go."),
    windows: int = typer.Option(16, min=1, help="Windows of 512 tokens that are read, at most."),
    tasks: bool = typer.Option(True, help="Also score arithmetic, copying and retrieval."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
    keep: bool = typer.Option(False, "--keep", help="Keep the figures that the JSON file has, and add what it lacks."),
    plot: Path | None = typer.Option(None),
    json_file: Path | None = typer.Option(None, "--json"),
) -> None:
    """Build and measure; the table comes at the end, the figures after each engine."""
    check_targets(plot, json_file)
    _check(only, VARIANTS)
    whole = _read(json_file) if keep else {}
    measured = {entry["name"] for entry in whole.get("engines", [])}
    with status() as progress:
        for name in dict.fromkeys([REFERENCE, *(only or VARIANTS)]):
            if name in measured:
                continue
            built = build_variants(recipe, [name], folder, progress=progress)
            report = measure_quality(
                built[-1:], built[0], windows=windows, tasks=tasks, num_threads=threads, progress=progress
            )
            whole = {**report, "engines": [*whole.get("engines", []), *report["engines"]]}
            write_json(whole, json_file)
    print_report(whole)
    if plot is not None:
        plot.write_text(draw(whole))


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
