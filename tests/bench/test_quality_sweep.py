"""The sweep over weight schemes and KV formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_build import SECTIONS, plancast_home, tiny_workshop

from bench.quality import sweep
from bench.quality.report import measure_quality
from bench.quality.sweep import REFERENCE, VARIANTS, build_variants
from builder.recipe import load_recipe
from runtime.errors import PlancastError


def test_every_variant_is_a_recipe_that_can_be_built() -> None:
    for name, overrides in VARIANTS.items():
        assert load_recipe("smollm2-135m-cpu", [f"name={name}", *overrides]).name == name


def test_variants_are_built_once_and_differ_as_they_say(tmp_path: Path) -> None:
    limits = [f"limits.{key}={value}" for key, value in SECTIONS["limits"].items()]
    overrides = [f"model={tiny_workshop() / 'model'}", *limits]
    with plancast_home(tiny_workshop() / "home"):
        built = build_variants("smollm2-135m-cpu", ["kv-int4", "int8"], tmp_path, overrides=overrides)
        stamps = [(folder / "manifest.json").stat().st_mtime_ns for folder in built]
        again = build_variants("smollm2-135m-cpu", ["int8"], tmp_path, overrides=overrides)
    assert [folder.name for folder in built] == [REFERENCE, "kv-int4", "int8"]
    assert [(folder / "manifest.json").stat().st_mtime_ns for folder in again] == [stamps[0], stamps[2]]
    engines = measure_quality(built, built[0], windows=1, tasks=False)["engines"]
    assert engines[0]["mean_kl"] < 1e-9
    assert (engines[1]["weights"], engines[1]["kv"]) == ("f32", "int4")
    assert (engines[2]["weights"], engines[2]["kv"]) == ("int8", "f16")
    assert engines[1]["kv_bytes_per_token"] < engines[2]["kv_bytes_per_token"] < engines[0]["kv_bytes_per_token"]


def test_an_unknown_variant_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match="no variant is called int3; there are: f32, kv-f16"):
        build_variants("smollm2-135m-cpu", ["int3"], tmp_path)


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure is there already: nothing is built (there is no such recipe), and the table is printed."""
    entry = {
        "name": REFERENCE, "weights": "f32", "kv": "f32", "bytes_per_weight": 4.0, "kv_bytes_per_token": 9,
        "perplexity": 2.0, "reference_perplexity": 2.0, "mean_kl": 0.0, "p99_kl": 0.0, "top1_agreement": 1.0,
        "tasks": {}, "by_position": [],
    }  # fmt: skip
    kept = tmp_path / "sweep.json"
    kept.write_text(json.dumps({"against": REFERENCE, "engines": [entry, {**entry, "name": "int8"}]}))
    start = {"recipe": "none", "only": ["int8"], "folder": tmp_path, "plot": None}
    sweep.main(**start, keep=True, json_file=kept)
    assert "int8" in capsys.readouterr().out
    with pytest.raises(PlancastError, match="none"):
        sweep.main(**start, keep=False, json_file=kept)
    kept.write_text("[]")
    with pytest.raises(PlancastError, match="no report of a sweep"):
        sweep.main(**start, keep=True, json_file=kept)
