"""A server of our own on an artifact, for as long as it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import PlancastError

START_S = 120.0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """Where it listens, and its process."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Processor seconds that it and its engines have taken so far, all threads (Linux)."""
        ticks = 0
        parents = {self.pid}
        for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):  # children come later
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(folder.name) in parents or int(fields[1]) in parents:
                parents.add(int(folder.name))
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(artifact: Path, *arguments: str) -> Iterator[LocalServer]:
    """`plancast serve` on a free port until the end of the block. Raises `PlancastError` with its log."""
    command = [sys.executable, "-m", "plancast", "serve", str(artifact), "--port", "0", *arguments]
    # A file, not a pipe: a log that nobody reads must not stop the server.
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log, open(log.name, "w") as written:
        process = subprocess.Popen(command, stderr=written)
        try:
            deadline = time.monotonic() + START_S
            while (url := _listening(Path(log.name).read_text())) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PlancastError(f"the server did not start:\n{Path(log.name).read_text().strip()}")
                time.sleep(0.1)
            yield LocalServer(url, process.pid)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=START_S)
            process.kill()
            process.wait()


def _listening(log: str) -> str | None:
    """The URL that the server's log names, once something answers there."""
    found = re.search(r" at (http://([\d.]+):(\d+))", log)
    if found is None:
        return None
    try:
        socket.create_connection((found[2], int(found[3])), timeout=1).close()
    except OSError:
        return None
    return found[1]
