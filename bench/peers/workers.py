"""Starting bench workers and talking to them: one JSON line each way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from bench.peers.environments import PeerError

ROOT = Path(__file__).resolve().parents[2]
_CLOSE_S = 20.0
# The last line of a traceback, or of a program that says what went wrong.
_TELLING = re.compile(r"^\w*(Error|Exception)\b|\berror: ")


class Worker:
    """A running engine that answers jobs. Loaded once and stopped between jobs, so that rounds can interleave.

    Stopped (SIGSTOP) and not only idle: some engines spin while they wait, which would cost the one that is measured.
    Its processes are a group of their own in our session, which the system lets go on and hangs up should we die.
    """

    def __init__(self, name: str, python: Path, script: Path, config: dict, log: Path):
        self.name = name
        self._log = log
        self._stderr = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(script), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            process_group=0,
        )
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _read(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print to stdout too
                return json.loads(line)
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)] or lines or ["no output"]
        raise PeerError(f"the {self.name} worker ended: {telling[-1]}")

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy completions of token-id prompts; returns (seconds, output token ids)."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return float(answer["seconds"]), answer["outputs"]

    @property
    def pid(self) -> int:
        """Of its first process, and of the group."""
        return self._process.pid

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the engine: it is told by the end of its input, and killed with all its processes if that takes long."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
