"""The zoo: where weights come from. `zoo.resolve(name)` gives a checkpoint on disk, pulling it where needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.card import ModelCard, find_card, load_cards
    from zoo.checkpoint import Checkpoint, open_folder
    from zoo.models import pull, remove, resolve
    from zoo.progress import Progress
    from zoo.safetensors_header import TensorRef

# Loaded on first use, so that the command line can import zoo.cli for nothing.
_EXPORTS = {
    "Checkpoint": "zoo.checkpoint",
    "ModelCard": "zoo.card",
    "Progress": "zoo.progress",
    "TensorRef": "zoo.safetensors_header",
    "find_card": "zoo.card",
    "load_cards": "zoo.card",
    "open_folder": "zoo.checkpoint",
    "pull": "zoo.models",
    "remove": "zoo.models",
    "resolve": "zoo.models",
}

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


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
