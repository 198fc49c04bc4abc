"""In-flight against static batching: simulated, so the comparison is exact."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import batching_bench
from bench.report import write_json


@pytest.fixture(scope="module")
def report() -> dict:
    return batching_bench.bench_batching(num_requests=40, max_num_seqs=8, tpot_slo=0.05)


def test_both_modes_do_the_same_work_and_in_flight_does_it_faster(report: dict) -> None:
    in_flight, static = report["modes"]
    assert (in_flight["mode"], static["mode"]) == ("in_flight", "static")
    assert in_flight["output_tokens"] == static["output_tokens"]
    assert report["speedup"] > 1.3
    assert in_flight["ttft_median"] < static["ttft_median"]
    assert in_flight["idle_slots"] < 0.5 < static["idle_slots"]
    assert in_flight["steps"] == len(in_flight["slots"])
    assert max(count for _, count in static["slots"]) == 8
    assert 0.0 <= in_flight["goodput"] <= 1.0


def test_a_simulation_gives_the_same_every_time(report: dict) -> None:
    assert batching_bench.bench_batching(num_requests=40, max_num_seqs=8, tpot_slo=0.05)["modes"] == report["modes"]


def test_the_report_can_be_read_drawn_and_stored(
    report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batching_bench.print_report(report)
    assert "x the throughput" in capsys.readouterr().out
    write_json(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["num_requests"] == 40
    root = ET.fromstring(batching_bench.draw(report))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("in-flight" in text for text in texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) == 2
