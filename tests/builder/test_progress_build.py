"""The progress display: figures for the manifest, lines where there is no terminal, a table where there is one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from builder.process_memory import MemoryMeter, release_memory, resident_bytes
from builder.progress import BuildProgress, LiveProgress, PlainProgress


def test_figures_hold_each_stage() -> None:
    with BuildProgress() as progress:
        with progress.stage("trace"):
            ballast = bytearray(64 << 20)
            ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])
        del ballast
        with progress.stage("compile"):
            pass
    figures = progress.figures()
    assert list(figures["seconds"]) == ["trace", "compile"]
    assert figures["total_seconds"] >= 0
    assert figures["peak_memory"]["trace"] > 64 << 20
    assert figures["max_memory"] >= max(figures["peak_memory"].values())


def test_meter_sees_a_peak_that_is_over() -> None:
    release_memory()  # of the tests before: given back meanwhile, it would hide the ballast
    with MemoryMeter(interval=0.01) as meter:
        before = meter.take_peak()
        ballast = bytearray(96 << 20)
        ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])
        import time

        time.sleep(0.2)
        del ballast
        assert meter.take_peak() - before > 64 << 20
    assert resident_bytes() > 0


def test_plain_progress_prints_a_line_for_each_stage_and_note() -> None:
    out = io.StringIO()
    with PlainProgress(out=out) as progress, progress.stage("trace") as stage:
        progress.note("the hub was passed over")
        progress.update("weights", 1, 2)
        stage.detail = "1823 operators"
    lines = out.getvalue().splitlines()
    assert lines[0] == "the hub was passed over"
    assert lines[1].startswith("trace")
    assert lines[1].endswith("1823 operators")
    assert len(lines) == 2


def test_live_progress_shows_stages_failures_and_what_it_does() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(console)
    with pytest.raises(RuntimeError), progress, progress.stage("pull"):  # noqa: PT012
        progress.update("model.safetensors", 1 << 20, 4 << 20)
        with console.capture() as capture:
            console.print(progress._render())
        assert "model.safetensors 1.0 MiB of 4.0 MiB" in capture.get()
        progress.note("a note [with brackets]")
        raise RuntimeError
    with console.capture() as capture:
        console.print(progress._render())
    assert "✗  pull" in capture.get()
    assert "a note [with brackets]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_interruption_that_was_swallowed_ends_the_build_at_the_next_report() -> None:
    """Python drops what a signal handler raises inside a weak reference's callback."""
    for progress in (BuildProgress(), PlainProgress(out=io.StringIO())):
        with pytest.raises(KeyboardInterrupt), progress, progress.stage("trace"):  # noqa: PT012
            progress.interruption = KeyboardInterrupt()
            progress.update("weights", 1, 2)
        assert progress.stages[0].failed
        with pytest.raises(KeyboardInterrupt), progress.stage("compile"):
            pass
        assert len(progress.stages) == 1
