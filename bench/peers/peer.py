"""What a peer is to the comparison: its environment, the precision it runs at, and how its worker starts."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.environments import PeerEnvironment, peers_folder
from bench.peers.workers import Worker
from zoo.checkpoint import INDEX, SIDE_FILES, find_weight_files
from zoo.hashing import sha256_text
from zoo.store import locked, slug

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.checkpoint import Checkpoint
    from zoo.progress import Progress

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """What every engine of one comparison is told alike."""

    recipe: Recipe
    checkpoint: Path  # the model in Hugging Face's format
    checkpoint_key: str  # a file name's stem that no other checkpoint has
    threads: int
    max_num_seqs: int
    max_model_len: int  # tokens a sequence
    logs: Path  # a folder for the workers' stderr

    @classmethod
    def of(
        cls, recipe: Recipe, checkpoint: Checkpoint, *, threads: int, max_num_seqs: int, max_model_len: int, logs: Path
    ) -> Setting:
        """The setting of a comparison of `recipe`'s model, whose files lie in `checkpoint`."""
        key = f"{slug(checkpoint.name)}-{sha256_text(repr(sorted(checkpoint.file_hashes().items())))[:12]}"
        return cls(recipe, linked_folder(checkpoint, key), key, threads, max_num_seqs, max_model_len, logs)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits as the worker scripts take them."""
        return {
            "threads": self.threads,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.recipe.limits.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
        }


class Peer(ABC):
    """One engine that plancast is measured against."""

    name: str
    script: str  # the worker, beside this file; it runs in the peer's environment
    environment: PeerEnvironment | None = None  # None: our own

    @abstractmethod
    def precision(self, recipe: Recipe) -> str:
        """What it computes in when compared with `recipe`: the nearest that it has, in words."""

    @abstractmethod
    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        """Bring the model into the peer's form (cached); returns what the worker is told besides the limits.

        Raises `PeerError` where that fails.
        """

    def set_up(self, setting: Setting, progress: Progress) -> tuple[Path, dict[str, Any]]:
        """Install and prepare; returns the Python and the configuration of its worker. Raises `PeerError`."""
        python = self.environment.ensure(progress) if self.environment else Path(sys.executable)
        with locked(
            f"peer model {setting.checkpoint_key} {self.environment.name if self.environment else ''}", progress
        ):
            return python, {**setting.limits, **self.prepare(setting, progress)}

    def start(self, setting: Setting, progress: Progress) -> Worker:
        """Set it up and start its worker. Raises `PeerError`."""
        python, config = self.set_up(setting, progress)
        progress.update("starting", 0, None)
        return Worker(self.name, python, HERE / self.script, config, setting.logs / f"{self.name}.log")


def linked_folder(checkpoint: Checkpoint, key: str) -> Path:
    """A folder of links to the checkpoint's files and no others: peers take every *.safetensors for a part of it."""
    folder = models_folder() / f"{key}-hf"
    names = [*SIDE_FILES, INDEX, *(path.name for path in find_weight_files(checkpoint.folder))]
    names += [path.name for path in checkpoint.folder.glob("*.py")]
    folder.mkdir(exist_ok=True)
    for name in names:
        source, link = checkpoint.folder / name, folder / name
        if source.exists() and not link.exists():
            link.unlink(missing_ok=True)  # a broken one
            link.symlink_to(source.resolve())
    return folder


def models_folder() -> Path:
    """Where the peers' forms of models are kept."""
    folder = peers_folder() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
