"""`plancast trace`: lives of requests out of a log, the picture, the Perfetto trace, the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from core_driver import Driver, FakeClock, make_core, make_request
from typer.testing import CliRunner

from runtime import trace_cli
from runtime.errors import PlancastError
from runtime.iteration_log import read_log
from runtime.svg import Svg, round_step
from runtime.trace_chrome import chrome_trace
from runtime.trace_picture import draw, draw_page
from runtime.trace_view import DECODE, PREEMPTED, PREFILL, WAITING, build_trace, summarize


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with waiting, chunks, preemptions, n = 2, an abort, and a name that wants escaping."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    clock = FakeClock(tick=0.001)
    driver = Driver(make_core(20, max_num_seqs=3, max_prefill_chunk=8, iteration_log=str(path), clock=clock))
    driver.add(make_request("a <&>", list(range(20)), max_tokens=20, ignore_eos=True, arrival_time=clock()))
    driver.add(
        make_request("b", list(range(9)), greedy=False, n=2, max_tokens=22, ignore_eos=True, arrival_time=clock())
    )
    driver.add(make_request("late", [1, 2], max_tokens=5, ignore_eos=True, arrival_time=clock()))
    driver.step()
    driver.add(make_request("gone", [3], max_tokens=50, arrival_time=clock()))
    while not driver.answers["late"].tokens:
        driver.step()
    driver.core.abort(["gone"])
    driver.run()
    assert driver.core.stats().preemptions > 0
    driver.core.close()
    return path


def test_lives_are_whole(log: Path) -> None:
    trace = build_trace(*read_log(str(log)))
    lives = {life.request_id: life for life in trace.requests}
    assert [life.reason for life in trace.requests] == ["finish", "finish", "finish"] + ["abort"] * (len(lives) - 3)
    assert (lives["a <&>"].output_tokens, lives["b"].output_tokens, lives["late"].output_tokens) == (20, 44, 5)
    assert sorted(lives["b"].sequences) == [0, 1]
    for life in trace.requests:
        assert life.end is not None
        for sequence in life.sequences.values():
            for before, after in zip(sequence.phases, sequence.phases[1:], strict=False):
                assert before.start <= before.end <= after.start + 1e-9, (life.request_id, before, after)
    kinds = [phase.kind for phase in lives["a <&>"].sequences[0].phases]
    assert kinds[:4] == [WAITING, PREFILL, PREFILL, PREFILL]
    assert kinds[-1] == DECODE
    preempted = sum(p.kind == PREEMPTED for life in trace.requests for p in life.sequences[0].phases)
    assert preempted == sum(life.preemptions for life in trace.requests) > 0
    assert lives["late"].sequences[0].phases[0].end - lives["late"].arrival > 0.01, "it waited"


def test_each_of_n_sequences_counts_its_first_token(tmp_path: Path) -> None:
    """A prompt that is computed and forked in its first step."""
    driver = Driver(make_core(iteration_log=str(tmp_path / "log")))
    driver.add(make_request("r", [1, 2], greedy=False, n=4, max_tokens=3, ignore_eos=True))
    driver.run()
    driver.core.close()
    trace = build_trace(*read_log(str(tmp_path / "log")))
    assert trace.requests[0].output_tokens == 12 == driver.core.stats().generation_tokens


def test_figures_add_up(log: Path) -> None:
    figures = summarize(build_trace(*read_log(str(log))))
    assert figures["output_tokens"] >= 69
    assert figures["finished"] == 3
    assert figures["run_ms"] == pytest.approx(1.0)
    assert figures["peak_blocks"] <= 20
    assert 0 < figures["ttft_median"] <= figures["ttft_p99"]


def test_the_picture_is_well_formed_and_names_everything(log: Path) -> None:
    trace = build_trace(*read_log(str(log)))
    root = ET.fromstring(draw(trace))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <&>", "b", "b [1]", "late", "KV blocks", "seconds", "waiting", "preempted"} <= texts
    told = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("tokens in" in text for text in told)
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("x"):
            assert float(rect.get("x", 0)) >= 0
            assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= trace_width(root) + 0.5
    page = draw_page(trace)
    assert "<svg" in page
    assert "output tokens per second" in page


def trace_width(root: ET.Element) -> float:
    return float(root.get("width", 0))


def test_the_chrome_trace_opens(log: Path) -> None:
    trace = build_trace(*read_log(str(log)))
    events = json.loads(json.dumps(chrome_trace(trace)))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert len(steps) == len(trace.steps)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"a <&>", "b [1]", "steps"} <= names


def app() -> typer.Typer:
    made = typer.Typer()
    trace_cli.register(made)
    made.command("other")(lambda: None)
    return made


def test_the_command_writes_what_is_asked_for(log: Path, tmp_path: Path) -> None:
    svg, page, chrome, figures = (tmp_path / name for name in ("x.svg", "x.html", "x.json", "figures.json"))
    run = CliRunner().invoke(
        app(), ["trace", str(log), "-o", str(svg), "--chrome", str(chrome), "--json", str(figures)]
    )
    assert run.exit_code == 0, run.output
    assert "preemptions" in run.output
    assert CliRunner().invoke(app(), ["trace", str(log), "--out", str(page)]).exit_code == 0
    assert svg.read_text().startswith("<svg")
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(chrome.read_text())["traceEvents"]
    assert json.loads(figures.read_text())["finished"] == 3


@pytest.mark.parametrize("arguments", [["absent"], ["LOG", "-o", "x.png"], ["LOG", "-o", "/nowhere/x.svg"], ["EMPTY"]])
def test_the_command_refuses_what_it_cannot_do(log: Path, tmp_path: Path, arguments: list[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(log.read_bytes().split(b"\n")[0] + b"\n")
    arguments = [{"LOG": str(log), "EMPTY": str(empty)}.get(word, word) for word in arguments]
    run = CliRunner().invoke(app(), ["trace", *arguments])
    assert isinstance(run.exception, PlancastError)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(("step", "expected"), [(0.013, 0.02), (1.0, 1.0), (3.1, 5.0), (70, 100.0), (0.0004, 0.0005)])
def test_ticks_are_round(step: float, expected: float) -> None:
    assert round_step(step) == pytest.approx(expected)


def test_an_empty_sheet_is_a_document() -> None:
    svg = Svg(10, 10)
    svg.area([], 5, "red")
    svg.axis(0, 0, 10, 0.0, "s")
    assert ET.fromstring(svg.render()).tag.endswith("svg")
