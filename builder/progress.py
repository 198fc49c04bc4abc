"""What a person sees while a build runs: each stage with its time and memory, live on a terminal, else line by line.

The stages report to a `BuildProgress`; it also keeps the figures that go into the manifest.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from builder.process_memory import MemoryMeter
from runtime.memory import format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(slots=True)
class Stage:
    """One stage of the build: when it ran, and the most memory meanwhile."""

    name: str
    started: float  # monotonic seconds
    seconds: float | None = None  # None while it runs
    peak_memory: int = 0  # bytes, of this process and its helpers
    detail: str = ""
    failed: bool = False


@dataclass
class BuildProgress:
    """Records the stages and shows nothing: the base of what shows, and what a library caller gets.

    Implements `zoo.progress.Progress`, so that a pull shows in the same place.
    """

    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    meter: MemoryMeter = field(default_factory=MemoryMeter)
    # Ends the build at the next report. A signal handler raises too, but what it raises is lost where Python cannot
    # pass it on: in a weak reference's callback, of which PyTorch has many.
    interruption: BaseException | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Run a stage under `name`. One at a time."""
        self.check()
        stage = Stage(name, time.monotonic())
        self.stages.append(stage)
        self.meter.take_peak()
        self.stage_started(stage)
        try:
            yield stage
            self.check()
        except BaseException:
            stage.failed = True
            raise
        finally:
            stage.seconds = time.monotonic() - stage.started
            stage.peak_memory = self.meter.take_peak()
        self.stage_ended(stage)

    def __enter__(self) -> BuildProgress:
        self.meter.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.meter.__exit__(*exception)

    def check(self) -> None:
        """Raise `interruption` if there is one."""
        if self.interruption is not None:
            raise self.interruption

    def note(self, line: str) -> None:
        """A line worth keeping."""
        self.notes.append(line)

    def update(self, task: str, done: int, total: int | None) -> None:
        """`done` of `total` (None: unknown) of `task`; bytes where it is a download."""
        self.check()

    def stage_started(self, stage: Stage) -> None:
        pass

    def stage_ended(self, stage: Stage) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        """Seconds by stage, peak memory by stage and over all (bytes), for the manifest."""
        done = [stage for stage in self.stages if stage.seconds is not None]
        return {
            "seconds": {stage.name: round(stage.seconds or 0.0, 3) for stage in done},
            "peak_memory": {stage.name: stage.peak_memory for stage in done},
            "total_seconds": round(sum(stage.seconds or 0.0 for stage in done), 3),
            "max_memory": self.meter.highest,
        }


@dataclass
class PlainProgress(BuildProgress):
    """A line for each finished stage: for logs, pipes and CI."""

    out: TextIO = field(default_factory=lambda: sys.stderr)

    def note(self, line: str) -> None:
        super().note(line)
        print(line, file=self.out, flush=True)

    def stage_ended(self, stage: Stage) -> None:
        figures = f"{stage.seconds:7.1f} s  {format_size(stage.peak_memory):>10}"
        print(f"{stage.name:<10} {figures}  {stage.detail}".rstrip(), file=self.out, flush=True)


class LiveProgress(BuildProgress):
    """A table that redraws itself on a terminal: stage, time, memory, and what it is doing now."""

    def __init__(self, console: Console):
        super().__init__()
        from rich.live import Live

        self._console = console
        self._doing = ""
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveProgress:
        super().__enter__()
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._doing = ""
        self._live.__exit__(*exception)
        super().__exit__(*exception)

    def note(self, line: str) -> None:
        super().note(line)
        self._console.print(line, markup=False, highlight=False)

    def update(self, task: str, done: int, total: int | None) -> None:
        super().update(task, done, total)
        if not total:
            self._doing = f"{task} {done}" if done else task
        elif total >= 1 << 20:
            self._doing = f"{task} {format_size(done)} of {format_size(total)}"
        else:
            self._doing = f"{task} {done}/{total}"

    def stage_started(self, stage: Stage) -> None:
        self._doing = ""

    def _render(self) -> RenderableType:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 1), show_header=False, pad_edge=False)
        table.add_column(width=1)
        table.add_column(min_width=9)
        table.add_column(justify="right", min_width=8)
        table.add_column(justify="right", min_width=10, style="dim")
        table.add_column(overflow="ellipsis", no_wrap=True)
        for stage in list(self.stages):
            if stage.seconds is None:
                mark: Any = self._spinner(Spinner)
                memory, detail = self.meter.current, self._doing
            else:
                mark = Text("✗", style="red") if stage.failed else Text("✓", style="green")
                memory, detail = stage.peak_memory, stage.detail
            seconds = stage.seconds if stage.seconds is not None else time.monotonic() - stage.started
            table.add_row(mark, stage.name, f"{seconds:.1f} s", format_size(memory), Text(detail, style="dim"))
        return table

    def _spinner(self, spinner: Any) -> Any:
        # One spinner for all redraws: a fresh one would start its animation over each time.
        if not hasattr(self, "_mark"):
            self._mark = spinner("dots", style="cyan")
        return self._mark


def make_progress(*, quiet: bool = False) -> BuildProgress:
    """What suits standard error: a live table on a terminal, else lines; nothing where `quiet`."""
    if quiet:
        return BuildProgress()
    from rich.console import Console

    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal else PlainProgress()
