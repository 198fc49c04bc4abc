"""`plancast bench speculation`: its prompts, its ratios and its pictures, on an engine that costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_served import write_served_artifact

from bench.speculation_bench import bench_speculation, draw, load_prompts, print_report
from runtime.errors import PlancastError


def test_every_prompt_is_complete() -> None:
    prompts = load_prompts()
    assert list(prompts) == ["chat", "code editing", "summarising", "retrieval"]
    assert all(len(texts) >= 4 and not any("{text" in text for text in texts) for texts in prompts.values())


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = write_served_artifact(tmp_path / "target", max_context_len=2048)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PLANCAST_EXECUTOR_FACTORY", "tiny_served:open_hash")
    parts: list[int] = []
    report = bench_speculation(
        artifact,
        ["ngram", "draft_model"],
        draft=str(artifact),
        workloads=["chat"],
        temperatures=[0.0],
        requests=[1, 4],
        max_tokens=12,
        rounds=1,
        num_threads=None,
        on_report=lambda part: parts.append(len(part["cells"])),
    )
    assert parts == [3, 6], "each measurement is told at once"
    cells = report["cells"]
    assert [(cell["requests"], cell["method"]) for cell in cells] == [
        (count, method) for count in (1, 4) for method in ("plain", "ngram", "draft_model")
    ]
    assert all(cell["identical"] == cell["answers"] == 8 for cell in cells)
    assert all(cell["tokens_per_second"] > 0 and cell["ratio"] > 0 for cell in cells)
    print_report(report)
    assert "draft_model" in capsys.readouterr().out
    picture = draw(json.loads(json.dumps(report)))
    assert picture.startswith("<svg")
    assert "temperature 0, 4 requests" in picture


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match="no workload 'poetry'; there are chat, code editing"):
        bench_speculation(
            tmp_path, [], draft=None, workloads=["poetry"], temperatures=[0.0], requests=[1], max_tokens=1, rounds=1,
            num_threads=None,
        )  # fmt: skip
