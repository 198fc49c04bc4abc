"""The target's last hidden states over the corpus: what a head reads, and what its own outputs shall come to.

An engine that has a head gives them as it writes; where it has none yet, the transformers model computes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from builder.drafts.corpus import answered
from builder.drafts.precision import half_where_fast
from builder.drafts.writer import Dialogue

_BATCH = 16  # dialogues


def write_features(target: Any, folder: Path, report: Callable[[int], None]) -> None:
    """Write a `hidden-*.npy` (f16) beside each `dialogues-*.npz` of `folder` that lacks them. `report(shards so far)`.

    `target`: the transformers model. It runs in bf16 where the CPU computes that natively.
    """
    for number, path in enumerate(sorted(folder.glob("dialogues-*.npz")), 1):
        made = hidden_path(path)
        if not made.is_file() and any(dialogue.hidden is None for dialogue in answered(path)):
            states = np.concatenate([np.zeros((0, target.config.hidden_size), np.float16), *_states(target, path)])
            beside = made.with_suffix(".writing")
            with open(beside, "wb") as file:
                np.save(file, states)
            os.replace(beside, made)
        report(number)


def read_features(folder: Path) -> list[tuple[Dialogue, NDArray[np.float16]]]:
    """Each dialogue with an answer of two tokens or more, and the hidden states [T - first, H] it was read off."""
    found: list[tuple[Dialogue, NDArray[np.float16]]] = []
    for path in sorted(folder.glob("dialogues-*.npz")):
        dialogues = answered(path)
        computed = np.load(hidden_path(path), mmap_mode="r") if hidden_path(path).is_file() else None
        at = 0
        for dialogue in dialogues:
            count = len(dialogue.token_ids) - dialogue.first
            states = dialogue.hidden if computed is None else computed[at : at + count]
            at += count
            if states is not None and count > 1:
                found.append((dialogue, states))
    return found


def hidden_path(dialogues: Path) -> Path:
    """Where the hidden states of a file of dialogues are."""
    return dialogues.with_name(dialogues.name.replace("dialogues", "hidden")).with_suffix(".npy")


@torch.no_grad()
def _states(target: Any, path: Path) -> list[NDArray[np.float16]]:
    """Of each answered dialogue in turn. Those of like length run together: less padding."""
    dialogues = answered(path)
    order = sorted(range(len(dialogues)), key=lambda index: len(dialogues[index].token_ids))
    found: dict[int, NDArray[np.float16]] = {}
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        longest = max(len(dialogues[index].token_ids) for index in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros((len(batch), longest), np.int64)
        for row, index in enumerate(batch):
            length = len(dialogues[index].token_ids)
            ids[row, :length] = dialogues[index].token_ids
            mask[row, :length] = 1
        with half_where_fast():
            base = target.base_model
            states = base(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state
        for row, index in enumerate(batch):
            dialogue = dialogues[index]
            own = states[row, dialogue.first - 1 : len(dialogue.token_ids) - 1]
            found[index] = own.to(torch.float16).numpy()
    return [found[index] for index in range(len(dialogues))]
