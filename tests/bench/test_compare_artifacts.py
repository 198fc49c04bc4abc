"""Our own engines side by side: what the goal of the int8 KV cache is measured with."""

from __future__ import annotations

import pytest
from tiny_build import tiny_recipe
from tiny_hf import write_tiny_hf

from bench.compare_artifacts import compare_artifacts, print_report
from builder.build import build
from runtime.errors import PlancastError


def test_engines_are_measured_beside_each_other(tmp_path, capsys):
    model = write_tiny_hf(tmp_path / "model")
    artifacts = []
    for kv in ("f32", "int8"):
        recipe = tiny_recipe(model, kv={"key": kv, "value": kv}, parity={"enabled": False})
        artifacts.append(build(recipe, tmp_path / kv))
    report = compare_artifacts(
        artifacts, requests=(1, 2), prompt_tokens=20, output_tokens=4, rounds=2, threads=1, quiet=True
    )
    assert [(row["kv"], row["requests"]) for row in report["rows"]] == [
        ("f32", 1),
        ("int8", 1),
        ("f32", 2),
        ("int8", 2),
    ]
    assert report["rows"][2]["ratio_to_first"] == [1.0, 1.0]
    assert all(len(row["tokens_per_second"]) == len(row["ratio_to_first"]) == 2 for row in report["rows"])
    print_report(report)
    assert "2 x (20 tokens in + 4 out)" in capsys.readouterr().out
    with pytest.raises(PlancastError, match=r"takes 256 tokens a request, 250 \+ 10 are asked for"):
        compare_artifacts(artifacts, prompt_tokens=250, output_tokens=10)
