"""Hugging Face transformers' `generate` in bf16: one static batch, what many start from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.peers.peer import Peer, Setting

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.progress import Progress


class Transformers(Peer):
    name = "transformers"
    script = "worker_transformers.py"

    def precision(self, recipe: Recipe) -> str:
        return "bf16"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        return {"model": str(setting.checkpoint)}
