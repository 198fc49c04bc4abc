"""What every measurement does with its figures: say how far it is, and write them down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being measured; yields what changes it."""
    from rich.console import Console

    with Console(stderr=True).status("measuring") as line:
        yield lambda text: line.update(f"measuring {text}")


def write_json(report: Any, path: Path | None) -> None:
    """Write a report, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
