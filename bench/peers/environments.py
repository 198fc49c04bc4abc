"""A virtual environment a peer, so that its requirements never meet ours. Made once, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import PlancastError


class PeerError(PlancastError):
    """A peer cannot be installed, prepared or run here."""


@dataclass(frozen=True)
class PeerEnvironment:
    """What a peer needs: pip requirements in order, and what must go again afterwards."""

    name: str
    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        home = Path(os.environ.get("PLANCAST_HOME") or Path.home() / ".cache" / "plancast")
        key = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return home / "peers" / f"{self.name}-{key}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def ensure(self) -> Path:
        """Install the peer if it is not there yet; returns its Python. Raises `PeerError` with pip's last words."""
        done = self.folder / ".installed"
        if done.exists():
            return self.python
        print(f"installing {self.name} into {self.folder} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
        pip = [str(self.python), "-m", "pip"]
        steps = [[*pip, "install", "--quiet", "--disable-pip-version-check", *self.requirements]]
        if self.remove:
            steps.append([*pip, "uninstall", "--quiet", "--yes", *self.remove])
        for step in steps:
            result = subprocess.run(step, capture_output=True, text=True, check=False)
            if result.returncode:
                raise PeerError(f"cannot install {self.name}: {result.stderr.strip().splitlines()[-1:]}")
        done.touch()
        return self.python


# torchvision from the index does not import beside a CPU build of torch, and optimum does not need it here.
OPENVINO_GENAI = PeerEnvironment(
    name="openvino-genai",
    requirements=(
        "torch==2.13.0",
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers",
        "optimum-intel==2.2.0",
        "transformers<5.6",
        "nncf",
    ),
    remove=("torchvision",),
)
