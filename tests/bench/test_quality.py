"""`plancast quality`: an engine against itself and against a coarser one, and the tasks' scoring."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from tiny_build import plancast_home, tiny_recipe, tiny_workshop
from typer.testing import CliRunner

from bench.quality import tasks
from bench.quality.reading import Reader, log_softmax
from bench.quality.report import draw, measure_quality, print_report
from bench.quality.tasks import Item, Passage, Task, fitting_tasks, score
from builder.build import build
from plancast import _make_app
from runtime.artifact import read_manifest
from runtime.errors import PlancastError


@pytest.fixture(scope="module")
def f32() -> Path:
    return tiny_workshop() / "artifact"


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with the recipe's calibrated int4, built end to end."""
    out = tmp_path_factory.mktemp("int4") / "artifact"
    calibration = {"samples": 8, "tokens": 64}
    weights = {"dtype": "int4", "method": "awq+gptq", "calibration": calibration}
    with plancast_home(tiny_workshop() / "home"):
        build(tiny_recipe(tiny_workshop() / "model", name="tiny-int4", weights=weights), out)
    return out


@pytest.fixture(scope="module")
def report(f32: Path, int4: Path) -> dict:
    return measure_quality([f32, int4], f32, windows=3)


def test_an_engine_is_itself_and_a_coarser_one_is_not(report: dict, f32: Path, int4: Path) -> None:
    same, coarse = report["engines"]
    assert same["mean_kl"] == same["p99_kl"] == 0
    assert same["top1_agreement"] == 1
    assert same["perplexity"] == same["reference_perplexity"] == coarse["reference_perplexity"]
    assert 0 < coarse["mean_kl"] < coarse["p99_kl"]
    assert coarse["top1_agreement"] < 1
    # The build's own comparison, with the Hugging Face model, on the same text cut otherwise.
    parity = read_manifest(int4).parity
    assert parity is not None
    assert coarse["mean_kl"] == pytest.approx(parity.mean_kl, rel=0.3)


def test_what_an_engine_costs_is_stated(report: dict, f32: Path) -> None:
    same, coarse = report["engines"]
    assert same["bytes_per_weight"] == pytest.approx(4, rel=0.02)
    assert 0.5 < coarse["bytes_per_weight"] < 1.2
    assert coarse["weights"] == "int4 g32 awq+gptq"
    assert same["kv_bytes_per_token"] == read_manifest(f32).kv.bytes_per_token


def test_error_over_position_covers_the_context(report: dict, f32: Path) -> None:
    for entry in report["engines"]:
        assert [bucket["position"] for bucket in entry["by_position"]] == [0, 128]
        assert all(np.isfinite(bucket["mean_kl"]) for bucket in entry["by_position"])


def test_report_and_plot(report: dict, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report)
    printed = capsys.readouterr().out
    assert "tiny" in printed
    document = ET.fromstring(draw(report))
    assert len(document.findall("{*}svg")) == 3
    assert json.loads(json.dumps(report))["machine"]["date"]


def test_without_a_reference_nothing_is_compared(f32: Path) -> None:
    entry = measure_quality([f32], None, windows=1, tasks=False)["engines"][0]
    assert "mean_kl" not in entry
    assert entry["perplexity"] > 1
    assert entry["tasks"] == {}


def greedy(reader: Reader, tokens: list[int], count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        *_, last = reader.chunks(tokens + answer)
        answer.append(int(last[-1].argmax()))
    return answer


def test_what_greedy_decoding_gives_is_solved_and_anything_else_is_not(f32: Path) -> None:
    with Reader(f32) as reader:
        for first in range(40):  # a random model's answer is rarely text that is read back as the same tokens
            context, question = f"one two three {first}", " four"
            asked = reader.prefix + reader.encode(context) + reader.encode(question)
            answer = greedy(reader, asked, 2)
            text = reader.tokenizer.decode(answer)
            if text and reader.encode(question + text) == reader.encode(question) + answer:
                break
        else:
            pytest.fail("no answer is read back as the tokens that it was")
        right, wrong = Item(question, text), Item(question, " something else")
        figures = score(reader, Task("mine", (Passage(context, (right, wrong)),)))
    assert figures["solved"] == 0.5


def test_a_question_after_a_read_context_is_as_read_from_the_start(f32: Path) -> None:
    with Reader(f32) as reader:
        context, question = list(range(20, 90)), list(range(5, 25))
        whole = np.concatenate([rows.copy() for rows in reader.chunks(context + question, logits_from=len(context))])
        for _ in reader.chunks(context, logits_from=len(context)):
            pass
        for _ in range(2):  # the second time over what the first has left in the cache
            again = np.concatenate([rows.copy() for rows in reader.chunks(question, len(context))])
            np.testing.assert_allclose(log_softmax(again), log_softmax(whole), atol=1e-4)


def test_tasks_are_the_same_every_time_and_fit(f32: Path) -> None:
    assert tasks.retrieval(40) == tasks.retrieval(40)
    with Reader(f32) as reader:
        for passage in (passage for task in fitting_tasks(reader) for passage in task.passages):
            longest = max(len(reader.encode(item.question + item.answer)) for item in passage.items)
            assert len(reader.encode(passage.context)) + longest < reader.manifest.limits.max_context_len
    passages = tasks.retrieval(40).passages
    for passage in passages:
        for item in passage.items:
            assert item.question + item.answer + "." in passage.context
    assert len({passage.context for passage in passages}) == len(passages) > 1


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match=r"manifest"):
        measure_quality([tmp_path], None)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for option in ("--json", "--plot"):
        result = CliRunner().invoke(_make_app(), ["quality", str(tmp_path), option, str(tmp_path / "none" / "file")])
        assert isinstance(result.exception, PlancastError)
        assert f"there is no folder {tmp_path / 'none'}" in str(result.exception)
