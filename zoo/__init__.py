"""The zoo: where weights come from. `zoo.resolve(name)` gives a checkpoint on disk, pulling it where needed."""

from __future__ import annotations

from zoo.card import ModelCard, find_card, load_cards
from zoo.checkpoint import Checkpoint, open_folder
from zoo.models import pull, remove, resolve
from zoo.progress import Progress
from zoo.safetensors_header import TensorRef

__all__ = [
    "Checkpoint",
    "ModelCard",
    "Progress",
    "TensorRef",
    "find_card",
    "load_cards",
    "open_folder",
    "pull",
    "remove",
    "resolve",
]
