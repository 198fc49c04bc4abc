"""A progress bar over many requests, with the speed that the engine reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.outputs import RequestOutput


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Show a bar on standard error; call what it gives with each result as it comes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    started, tokens = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total, speed="")

        def report(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            speed = tokens / max(1e-9, time.monotonic() - started)
            bar.update(task, advance=1, speed=f"{speed:,.0f} tokens/s")

        yield report
