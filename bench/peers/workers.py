"""Starting bench workers and talking to them: one JSON line each way."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType

from bench.peers.environments import PeerError

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A running engine that answers jobs. Loaded once; idle between jobs, so that rounds can interleave."""

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
            env=None,
        )
        self.version = str(self._read()["version"])

    def _read(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print to stdout too
                return json.loads(line)
        tail = self._log.read_text().strip().splitlines()[-1:] or ["no output"]
        raise PeerError(f"the {self.name} worker ended: {tail[0]} (whole log: {self._log})")

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy completions of token-id prompts; returns (seconds, output token ids)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return float(answer["seconds"]), answer["outputs"]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
