"""The draft itself: the target's first layers and its last one, over its most frequent tokens."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.errors import PlancastError
from runtime.speculation.vocabulary import DRAFT_VOCABULARY
from zoo.checkpoint import SIDE_FILES


def choose_tokens(texts: Iterable[np.ndarray], always: Iterable[int], size: int, vocab_size: int) -> list[int]:
    """The target's ids that the draft knows, ascending: `always`, then the most frequent in `texts` (arrays of ids),
    then the lowest.

    A multiple of 32 of them, which the kernels like. The last one stands for what is not known.
    """
    size = min(size, vocab_size) // 32 * 32
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.ravel().tolist())
    chosen = dict.fromkeys(token_id for token_id in always if 0 <= token_id < vocab_size)
    for token_id, _ in counts.most_common():
        chosen.setdefault(token_id)
    for token_id in range(vocab_size):
        if len(chosen) >= size:
            break
        chosen.setdefault(token_id)
    return sorted(list(chosen)[:size])


def make_student(target: Path, num_layers: int, token_ids: list[int]) -> Any:
    """A transformers model with `num_layers` of the target's layers and the rows of `token_ids`.

    Raises `PlancastError` for a family whose layers are not where most keep them.
    """
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    layers = getattr(getattr(teacher, "model", None), "layers", None)
    if layers is None or len(layers) < num_layers:
        raise PlancastError(
            f"a draft of {num_layers} layers cannot be cut from {type(teacher).__name__}: it has "
            f"{'no model.layers' if layers is None else f'{len(layers)} layers'}"
        )
    picked = [*range(num_layers - 1), len(layers) - 1]
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers, config.vocab_size = num_layers, len(token_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in picked]
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rows = torch.tensor(token_ids)
    with torch.no_grad():
        student.model.norm.load_state_dict(teacher.model.norm.state_dict())
        for own, index in zip(student.model.layers, picked, strict=True):
            own.load_state_dict(layers[index].state_dict())
        own_rows: Any = student.get_input_embeddings()
        all_rows: Any = teacher.get_input_embeddings()
        own_rows.weight.copy_(all_rows.weight[rows])
        others = torch.ones(len(all_rows.weight), dtype=torch.bool)
        others[rows] = False
        if others.any():
            own_rows.weight[-1] = all_rows.weight[others].mean(0)
        if not config.tie_word_embeddings:
            own_head: Any = student.get_output_embeddings()
            whole_head: Any = teacher.get_output_embeddings()
            own_head.weight.copy_(whole_head.weight[rows])
    return student


def save_student(student: Any, target: Path, token_ids: list[int], folder: Path, card: str) -> None:
    """Write a folder that `plancast build` builds: weights, config, the target's tokenizer, the vocabulary, a card."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    student.save_pretrained(folder)
    for name in SIDE_FILES:
        if name not in ("config.json", "generation_config.json") and (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    table = {"target_ids": token_ids, "unknown": len(token_ids) - 1}
    (folder / DRAFT_VOCABULARY).write_bytes(msgspec.json.encode(table))
    (folder / "draft_card.md").write_text(card, encoding="utf-8")


def to_student_ids(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """i64 [vocab_size]: the draft's id of each of the target's; that of the last one where it has none."""
    table = np.full(vocab_size, len(token_ids) - 1, np.int64)
    table[token_ids] = np.arange(len(token_ids))
    return table
