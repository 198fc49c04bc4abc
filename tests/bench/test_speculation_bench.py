"""`plancast bench speculation`: its prompts, its ratios and its pictures, on an engine that costs nothing."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_served import write_served_artifact

from bench.speculation_bench import bench_speculation, draw, load_prompts, print_report
from bench.turns import play_by_turns
from runtime.engine_core import EngineCore
from runtime.engine_process import open_engine
from runtime.errors import PlancastError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams


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


def test_engines_that_step_by_turns_answer_as_they_do_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = write_served_artifact(tmp_path / "target", max_context_len=256)
    monkeypatch.setenv("PLANCAST_EXECUTOR_FACTORY", "tiny_served:open_hash")
    params, prompts = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), [[5, 6, 7], [8, 9]]
    cores: dict[str, EngineCore] = {}
    with ExitStack() as stack:
        for name, config in (("plain", "off"), ("drafting", "ngram")):
            llm = stack.enter_context(LLM(artifact, speculative_config=config, num_blocks=32))
            alone = [result.outputs[0].token_ids for result in llm.generate(_as_prompts(prompts), params)]
            opened = open_engine(llm.engine_spec)
            stack.callback(opened.close)
            cores[name] = opened.core
        played = play_by_turns(cores, prompts, params, random.Random(0))
        assert {name: each.answers for name, each in played.items()} == {"plain": alone, "drafting": alone}
        assert all(each.num_tokens == 40 and each.seconds > 0 for each in played.values())
        assert not any(core.has_work() for core in cores.values())
        with pytest.raises(RuntimeError, match="prompt 1 was refused: the prompt has 295 tokens"):
            play_by_turns(cores, [[5], list(range(5, 300))], params, random.Random(0))


def _as_prompts(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match="no workload 'poetry'; there are chat, code editing"):
        bench_speculation(
            tmp_path, [], draft=None, workloads=["poetry"], temperatures=[0.0], requests=[1], max_tokens=1, rounds=1,
            num_threads=None,
        )  # fmt: skip
