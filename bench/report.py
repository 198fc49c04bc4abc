"""What every measurement does with its figures: say how far it is, and write them down."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import PlancastError

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 160  # columns
_FILES = ("--json", "--html", "--plot")  # the options that say where something is written


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being measured; yields what changes it."""
    from rich.console import Console

    with Console(stderr=True).status("measuring") as line:
        yield lambda text: line.update(f"measuring {text}")


def check_targets(*paths: Path | None) -> None:
    """Raise `PlancastError` where a file to be written at the end cannot be: before minutes of measuring."""
    for path in paths:
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise PlancastError(f"{path} {what}; name a file in a folder that exists")


def write_json(report: Any, path: Path | None) -> None:
    """Write a report, where a file was asked for, with the command that made it."""
    if path is not None:
        line = command_line(sys.argv[1:], module=getattr(sys.modules["__main__"].__spec__, "name", None))
        command = {} if line is None else {"command": line}
        path.write_text(json.dumps({**command, **report} if isinstance(report, dict) else report, indent=1) + "\n")


def command_line(arguments: Sequence[str], module: str | None = None) -> str | None:
    """How the measurement was started, but for the names of the files that it wrote: `plancast` with these arguments,
    or the `module` that `python -m` runs; None where it is neither (a test, a notebook)."""
    if module is not None and module.startswith("bench."):
        kept = ["python", "-m", module]
    elif arguments[:1] in (["bench"], ["quality"]):
        kept = ["plancast"]
    else:
        return None
    leave_out = False
    for argument in arguments:
        if not leave_out and argument not in _FILES and not argument.startswith(tuple(f"{name}=" for name in _FILES)):
            kept.append(argument)
        leave_out = not leave_out and argument in _FILES
    return shlex.join(kept)


def table_console() -> Console:
    """Where a wide table is printed: as wide as the terminal, and wide enough for one in a file or a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDE))


def run_script(start: Callable[[], object]) -> None:
    """Run a measurement that `python -m` starts: an error of ours is one line and its exit code, no traceback."""
    try:
        start()
    except PlancastError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
