"""The runtime's benchmarks run, and what they report is consistent. Speeds are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import runtime_bench
from bench.core_workloads import SHAREGPT_MEANS, make_jobs, play, quantile, sharegpt_lengths
from bench.fake_executor import FakeExecutor, SimulatedClock
from bench.kv_waste import measure_reuse, measure_sharing, measure_waste
from bench.overlap import measure_idle
from bench.report import write_json
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore


def test_the_mix_has_sharegpts_means_within_the_context() -> None:
    lengths = sharegpt_lengths(4000)
    for column, mean in enumerate(SHAREGPT_MEANS):
        values = [pair[column] for pair in lengths]
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.06)
    assert max(prompt + output for prompt, output in lengths) <= 2048
    assert min(min(pair) for pair in lengths) >= 4


def test_waste_is_below_four_per_cent_up_to_blocks_of_32() -> None:
    """PagedAttention's figure, on its length mix; reserving the context wastes most of it."""
    for block_size, bound in ((16, 0.02), (32, 0.04)):
        waste = measure_waste(block_size, num_jobs=150)
        assert 0.0 < waste.paged < bound
        assert waste.reserved_context > 0.6
        assert waste.reserved_exact > 0.3


def test_sharing_and_reuse() -> None:
    sharing = measure_sharing(n=8, prompt_tokens=1000, output_tokens=100, block_size=32)
    assert sharing.unshared_blocks == 8 * 35
    assert sharing.blocks == 31 + 8 * 4
    reuse = measure_reuse()
    assert reuse.first == 1016
    assert reuse.saved >= 0.9


def test_time_passes_only_where_the_engine_takes_it() -> None:
    clock = SimulatedClock()
    executor = FakeExecutor(100, cost=lambda batch: 0.5, wait=clock.wait)
    core = EngineCore(executor, EngineConfig(max_context_len=64, max_num_seqs=4), clock=clock)
    (first, second) = play(core, make_jobs([(4, 3), (4, 3)], rate=0.01, seed=3))
    assert first.ttft == pytest.approx(0.5)
    assert first.tpot == second.tpot == pytest.approx(0.5)
    assert second.arrival > 20
    assert clock() == pytest.approx(second.arrival + 1.5)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_what_the_host_does_beside_the_device_is_hidden() -> None:
    """Eight requests cost the host some tenths of a millisecond a step, and the device waits for few hundredths."""
    idle = measure_idle(8, vocab_size=1024, steps=60)
    assert idle.serial > 0.02
    assert idle.beside < idle.serial / 2


def test_the_report_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = runtime_bench.bench_runtime((1, 4), steps=20, waste_jobs=20)
    runtime_bench.print_report(report)
    assert "ms" in capsys.readouterr().out
    write_json(report, tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert [row["running"] for row in stored["steps"]] == [1, 4, 1, 4]
    for row in stored["steps"]:
        assert 0 < row["total"] <= row["total_p90"]
    assert [row["running"] for row in stored["device_idle"]] == [1, 4]
    assert "harvest" in runtime_bench.profile(4, 10)
