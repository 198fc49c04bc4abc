"""Speed over context and requests."""

from __future__ import annotations

import xml.dom.minidom

import pytest
from tiny_build import tiny_recipe
from tiny_hf import write_tiny_hf

from bench.scaling import bench_scaling, draw, print_report
from builder.build import build
from runtime.errors import PlancastError


def test_both_sweeps_are_measured_and_drawn(tmp_path, capsys):
    recipe = tiny_recipe(write_tiny_hf(tmp_path / "model"), parity={"enabled": False})
    artifact = build(recipe, tmp_path / "out")
    report = bench_scaling(artifact, contexts=[16, 200], requests=[1, 3], output_tokens=8, rounds=1, threads=1)
    cases = [(row["sweep"], row["requests"], row["prompt_tokens"]) for row in report["rows"]]
    assert cases == [("context", 1, 16), ("context", 1, 200), ("requests", 1, 128), ("requests", 3, 128)]
    print_report(report)
    assert "prefill" in capsys.readouterr().out
    drawing = draw(report)
    xml.dom.minidom.parseString(drawing)
    assert "tiny (f32 weights, f32 KV)" in drawing
    with pytest.raises(PlancastError, match=r"takes 256 tokens a request, 300 \+ 8.*limits\.max_context_len=308"):
        bench_scaling(artifact, contexts=[300], requests=[1], output_tokens=8)
