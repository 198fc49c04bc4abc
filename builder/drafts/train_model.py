"""Distils a draft: its distribution is drawn to the target's likeliest tokens at every position that the target wrote.

The loss is the cross-entropy to the target's own probabilities of its top tokens, of those that the draft knows
(knowledge distillation, Hinton et al. 2015, on the target's own text as in Zhou et al. 2023, DistillSpec).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from builder.drafts.config import DraftTraining
from builder.drafts.precision import half_where_fast
from builder.drafts.train import Acceptance, count_hits
from builder.drafts.writer import Dialogue


@dataclass(slots=True)
class _Batch:
    """B dialogues padded to T: ids i64 [B, T]; of each answer's position, where its logits stand (rows into B * T), the
    target's top ids in the draft's vocabulary [N, K], their weights f32 [N, K], and the token that came [N]."""

    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    top_ids: torch.Tensor
    top_p: torch.Tensor
    came: torch.Tensor
    starts: list[int]  # of each dialogue's rows


def _batch(dialogues: Sequence[Dialogue], table: np.ndarray, unknown: int) -> _Batch:
    longest = max(len(d.token_ids) for d in dialogues)
    ids = np.full((len(dialogues), longest), unknown, np.int64)
    mask = np.zeros((len(dialogues), longest), np.int64)
    rows, top_ids, top_p, came, starts = [], [], [], [], []
    for index, dialogue in enumerate(dialogues):
        length = len(dialogue.token_ids)
        ids[index, :length] = table[dialogue.token_ids]
        mask[index, :length] = 1
        starts.append(sum(map(len, rows)))
        rows.append(index * longest + np.arange(dialogue.first - 1, length - 1))  # the row before predicts
        mapped = table[dialogue.top_ids]
        top_ids.append(mapped)
        top_p.append(np.where(mapped == unknown, 0.0, dialogue.top_p.astype(np.float32)))
        came.append(table[dialogue.token_ids[dialogue.first :]])
    each = [torch.from_numpy(np.concatenate(part)) for part in (rows, top_ids, top_p, came)]
    return _Batch(torch.from_numpy(ids), torch.from_numpy(mask), *each, starts)  # type: ignore[arg-type]


def _logits(student: Any, batch: _Batch) -> torch.Tensor:
    """f32 [N, D] at the batch's rows."""
    hidden = student.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    return student.lm_head(hidden.flatten(0, 1)[batch.rows])


class ModelTraining:
    """What `builder.drafts.train.train` trains, for a draft model. `table` i64 [V]: the draft's id of each target's."""

    def __init__(self, student: Any, table: np.ndarray, config: DraftTraining):
        self.module: nn.Module = student
        self._student, self._table = student, table
        self._unknown = student.config.vocab_size - 1
        self._draft_length = config.draft_length

    def length(self, example: Dialogue) -> int:
        return len(example.token_ids)

    def loss(self, examples: Sequence[Dialogue], done: float) -> torch.Tensor:
        batch = _batch(examples, self._table, self._unknown)
        with half_where_fast():
            logits = _logits(self._student, batch)
        log_q = logits.float().log_softmax(-1).gather(1, batch.top_ids)
        return -(batch.top_p * log_q).sum() / batch.top_p.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held_out: Sequence[Dialogue]) -> Acceptance:
        """All tokens of a draft so far are the text's own, or it has ended: so one pass over the text says it all."""
        reached, right = np.zeros(self._draft_length), np.zeros(self._draft_length)
        for at in range(0, len(held_out), 8):
            batch = _batch(held_out[at : at + 8], self._table, self._unknown)
            with half_where_fast():
                picked = _logits(self._student, batch).argmax(-1)
            same = ((picked == batch.came) & (batch.came != self._unknown)).numpy()
            for start, end in zip(batch.starts, [*batch.starts[1:], len(same)], strict=True):
                along = np.stack([np.roll(same[start:end], -depth) for depth in range(self._draft_length)])
                count_hits(along, reached, right)
        return Acceptance.of(reached, right)
