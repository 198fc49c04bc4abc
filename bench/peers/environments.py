"""A virtual environment a peer, so that its requirements never meet ours. Made once, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import PlancastError
from zoo.progress import Progress
from zoo.store import locked, require_disk

# A peer with its torch takes up to so many bytes, the downloads among them.
_DISK_BYTES = 6 << 30


class PeerError(PlancastError):
    """A peer cannot be installed, prepared or run here."""


def peers_folder() -> Path:
    """Where peers, their exports and their builds are kept: `peers/` under $PLANCAST_HOME (~/.cache/plancast)."""
    folder = Path(os.environ.get("PLANCAST_HOME") or Path.home() / ".cache" / "plancast") / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class PeerEnvironment:
    """What a peer needs: `pip install` argument lists in order, what must go again, and a last step of its own.

    `finish` gets the environment's folder and the progress; it raises `PeerError` where the step fails. It may keep
    what took long outside that folder, which begins anew after a failure.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()
    finish: Callable[[Path, Progress], None] | None = None

    @property
    def folder(self) -> Path:
        key = hashlib.sha256(repr((self.installs, self.remove)).encode()).hexdigest()[:12]
        return peers_folder() / f"{self.name}-{key}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def ensure(self, progress: Progress) -> Path:
        """Install the peer if it is not there yet; returns its Python. Raises `PeerError` with the last words."""
        done = self.folder / ".installed"
        if done.exists():
            return self.python
        with locked(f"peer {self.name}", progress):
            if done.exists():  # another process was at it
                return self.python
            require_disk(peers_folder(), _DISK_BYTES, f"the environment of {self.name}")
            progress.note(f"installing {self.name} into {self.folder}")
            run([sys.executable, "-m", "venv", "--clear", str(self.folder)], f"make an environment for {self.name}")
            for arguments in self.installs:
                self.install(progress, *arguments)
            if self.remove:
                self._pip("uninstall", "--yes", *self.remove)
            if self.finish is not None:
                self.finish(self.folder, progress)
            done.touch()
        return self.python

    def install(self, progress: Progress, *arguments: str) -> None:
        """Run the environment's pip, showing what it is at. Raises `PeerError` with its last line."""
        self._pip("install", *arguments, on_line=lambda line: progress.update(line.strip()[:90], 0, None))

    def _pip(self, command: str, *arguments: str, on_line: Callable[[str], None] | None = None) -> None:
        pip = [str(self.python), "-m", "pip", command, "--disable-pip-version-check", "--no-input"]
        run([*pip, *arguments], f"install {self.name}", on_line=on_line)


def run(
    command: list[str],
    what: str,
    *,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return what it wrote to stdout, of which `on_line` is told as it comes.

    `environment` is set besides our own. Raises `PeerError`: cannot `what`, with the line that tells why.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise PeerError(f"cannot {what}: {command[0]}: {error.strerror}") from None
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            stderr.seek(0)
            words = [line.strip() for line in [*lines, *stderr] if line.strip()] or ["no output"]
            telling = [line for line in words if "error" in line.lower()] or words
            raise PeerError(f"cannot {what}: {telling[-1]}")
    return "".join(lines)
