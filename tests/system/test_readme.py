"""The README's commands run as written: every `$ ` line of its `console` blocks, in order, in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
# `make test` is this very run; a line that says so in a comment needs what only its reader has.
SKIPPED = re.compile(r"^make test$|# not run by the tests")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


def commands() -> list[str]:
    """The lines after `$ `, with lines that go on after a backslash."""
    found: list[str] = []
    for block in blocks("console"):
        going_on = False
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif going_on:
                found[-1] += "\n" + line
            going_on = (line.startswith("$ ") or going_on) and line.endswith("\\")
    return [command for command in found if not SKIPPED.search(command)]


def test_every_command_of_the_docs_exists() -> None:
    """With the options that it is given: the docs' commands are not all run."""
    import typer

    from plancast import _make_app

    top: Any = typer.main.get_command(_make_app())
    wrong, count = [], 0
    for path in (README, *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.strip().removeprefix("$ ").split("#")[0].split()
                if words[:1] != ["plancast"]:
                    continue
                count += 1
                command, rest = top, words[1:]
                while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
                    command, rest = command.commands.get(rest[0]), rest[1:]
                known = {
                    name for option in getattr(command, "params", []) for name in (*option.opts, *option.secondary_opts)
                }
                given = {word.split("=")[0] for word in rest if word.startswith("--")}
                if command is None or given - known - {"--help", "--version"}:
                    wrong.append(f"{path.name}: {line.strip()}")
    assert count > 40
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as git has it, with this run's virtual environment, so that nothing is installed twice."""
    folder = tmp_path_factory.mktemp("readme") / "plancast"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout: the tree cannot be copied as git has it")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if not (ROOT / ".venv" / ".build").exists():
        pytest.skip("no .venv made by `make setup`")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    # Older than the environment, whatever has changed since: `make` in the copy must not install the copy into it.
    os.utime(folder / "pyproject.toml", (0, 0))
    return folder


def wait_until_serving(url: str, process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"{url} did not answer within {seconds:.0f} s")


@pytest.mark.model
@pytest.mark.slow
def test_commands_run_as_written(copy: Path) -> None:
    wanted = commands()
    assert len(wanted) > 8
    # Activated as a reader would have it from `source .venv/bin/activate` on.
    environment = {**os.environ, "PATH": f"{copy / '.venv' / 'bin'}:{os.environ['PATH']}"}
    servers: list[subprocess.Popen] = []
    try:
        for command in wanted:
            if command.endswith(" &"):
                server = subprocess.Popen(
                    ["bash", "-c", "exec " + command.removesuffix(" &")],
                    cwd=copy,
                    env=environment,
                    start_new_session=True,
                )
                servers.append(server)
                port = re.search(r"--port (\d+)", command)
                wait_until_serving(f"http://127.0.0.1:{port[1] if port else 8000}/health", server, 60)
                continue
            done = subprocess.run(["bash", "-c", command], cwd=copy, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            if "curl" in command:
                assert '"choices"' in done.stdout
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)


@pytest.mark.model
def test_python_runs_as_written(copy: Path, smollm2_artifact: Path) -> None:
    (copy / "artifacts").mkdir(exist_ok=True)
    target = copy / "artifacts" / "smollm2-135m-cpu"
    if not target.exists():
        shutil.copytree(smollm2_artifact, target)
    for code in blocks("python"):
        python = copy / ".venv" / "bin" / "python"
        done = subprocess.run([python, "-c", code], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip()
