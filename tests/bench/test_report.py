"""What a report says of how it was made, and where its tables go."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.report import command_line, table_console


@pytest.mark.parametrize(
    ("arguments", "module", "line"),
    [
        (["bench", "peers", "--json", "a b.json", "--rounds", "2"], None, "plancast bench peers --rounds 2"),
        (["quality", "x y", "--plot=a.svg"], None, "plancast quality 'x y'"),
        (["--only", "f32", "--plot", "a.svg"], "bench.quality.sweep", "python -m bench.quality.sweep --only f32"),
        (["bench"], "pytest.__main__", "plancast bench"),
        (["-x"], "pytest.__main__", None),
        (["build"], None, None),
    ],
)
def test_a_report_tells_its_command_without_the_files_it_wrote(
    arguments: list[str], module: str | None, line: str | None
) -> None:
    assert command_line(arguments, module) == line


def test_a_table_in_a_file_has_room_for_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table_console().print("x" * 150)
    assert "x" * 150 in capsys.readouterr().out


def test_a_script_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.quality.sweep", "--only", "int3"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no variant is called int3; there are: f32")
    assert done.stderr.count("\n") == 1
