"""Trains a head: its reading to the target's distributions, its outputs to the target's hidden states.

The losses are EAGLE's (soft cross-entropy over the head's tokens; smooth L1 on features), at each position of a draft:
later positions read the head's own outputs, as they do when it drafts (HASS, EAGLE-3's training-time test), from the
middle of the training on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from builder.drafts.config import DraftTraining
from builder.drafts.head import EagleHead, UnrolledAttention, unroll
from builder.drafts.precision import half_where_fast, training_dtype
from builder.drafts.repetition import repeated
from builder.drafts.train import Acceptance, count_hits
from builder.drafts.writer import Dialogue

Example = tuple[Dialogue, NDArray[np.float16]]
# A later position of a draft counts less: it is reached only where those before it were accepted.
_LATER = 0.7
_NOISE = 0.2  # in standard deviations of a hidden state, at most
# Until then a step is one pass over the text: later passes cost as much each, and read outputs that are still far off.
_UNROLLED_FROM = 0.5
# What a token counts that ends four which stood in the text before: look-ups draft those for nothing.
_REPEATED = 0.25
_RIDGE = 0.003  # of what a matrix reads, mean square
_ROWS = 256  # logits of so many rows at once


class _Batch(NamedTuple):
    """B answers of at most T slots; slot j holds the answer's token j and the hidden state that it was read off.

    tokens i64 [B, T] (the token that followed, of the target's vocabulary), hidden f32 [B, T, H], after f32 [B, T, H]
    (the next hidden state, which reads the token that `came` i64 [B, T], in the head's ids, -1: none or unknown).
    `counts` f32 [B, T]: what each slot's output counts in the loss.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    after: torch.Tensor
    came: torch.Tensor
    counts: torch.Tensor
    lengths: list[int]


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of what `weight` reads off the outputs [P, N, H] to what it reads off `after` [N, H], each row by
    its entry of `weights` [P, N].

    A few rows at a time, with their gradients, so that the logits never leave the cache: they would be most of a step.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Any, after: Any, weight: Any, weights: Any) -> Any:  # type: ignore[override]
        dtype = training_dtype()
        reading = weight.to(dtype)
        gradients = torch.empty_like(outputs)
        total = torch.zeros(())
        for at in range(0, outputs.shape[1], _ROWS):
            rows = slice(at, at + _ROWS)
            wanted = (after[rows].to(dtype) @ reading.T).float().softmax(-1)
            for depth, output in enumerate(outputs):
                logits = (output[rows].to(dtype) @ reading.T).float()
                norm = logits.logsumexp(-1, keepdim=True)
                counts = weights[depth, rows, None]
                total += (counts[:, 0] * (norm[:, 0] - (wanted * logits).sum(-1))).sum()
                error = logits.sub_(norm).exp_().sub_(wanted).mul_(counts)
                gradients[depth, rows] = (error.to(dtype) @ reading).float()
        ctx.save_for_backward(gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0], None, None, None


class HeadTraining:
    """What `builder.drafts.train.train` trains, for a head. `table` i64 [V]: the head's id of each token in `known`."""

    def __init__(self, head: EagleHead, table: NDArray[np.int64], known: NDArray[np.bool_], config: DraftTraining):
        self.module: nn.Module = head
        self._head, self._table, self._known = head, table, known
        self._passes, self._feature_weight = config.passes, config.feature_weight
        self._draft_length = config.draft_length

    def length(self, example: Example) -> int:
        """Slots of an example, which is what a step's size is counted in."""
        return len(example[1]) - 1

    def loss(self, examples: Sequence[Example], done: float) -> torch.Tensor:
        passes = self._passes if done >= _UNROLLED_FROM else 1
        batch = self._batch(examples)
        head = self._head
        slots = torch.arange(batch.tokens.shape[1])[None]
        inside = slots < torch.tensor(batch.lengths)[:, None]
        after = batch.after[inside]
        spread = after.std().clamp(min=1e-3)
        # EAGLE's noise on what is read, against learning a small corpus by heart; the batch decides it, so that a run
        # that was stopped goes on as it would have.
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        noise = torch.rand(batch.hidden.shape, generator=generator).sub_(0.5).mul_(2 * _NOISE * spread)
        with half_where_fast():
            outputs = unroll(head, batch.tokens, batch.hidden + noise, passes)
        # [P, N]: what each output counts; the first slots of a later pass are of no draft.
        counts = batch.counts[inside]
        weights = torch.stack(
            [(slots >= depth).expand_as(inside)[inside] * counts * _LATER**depth for depth in range(passes)]
        )
        weights = weights / weights.sum()
        rows = torch.stack([output[inside].float() for output in outputs])
        reading: torch.Tensor = _SoftCrossEntropy.apply(rows, after, head.lm_head.weight, weights)  # type: ignore[assignment]
        apart = nn.functional.smooth_l1_loss(rows / spread, (after / spread).expand_as(rows), reduction="none")
        return reading + self._feature_weight * (apart.mean(-1) * weights).sum()

    @torch.no_grad()
    def measure(self, held_out: Sequence[Example]) -> Acceptance:
        """Acceptance of greedy drafts along held-out text."""
        reached, right = np.zeros(self._draft_length), np.zeros(self._draft_length)
        for at in range(0, len(held_out), 8):
            batch = self._batch(held_out[at : at + 8])
            with half_where_fast():
                outputs = unroll(self._head, batch.tokens, batch.hidden, self._draft_length)
                picked = torch.stack([self._head.lm_head(output).argmax(-1) for output in outputs])
            hits = (picked == batch.came[None]).numpy()
            for index, length in enumerate(batch.lengths):
                # A draft that begins at slot j has its s-th token from slot j + s of pass s.
                along = np.stack([np.roll(hits[depth, index, :length], -depth) for depth in range(self._draft_length)])
                count_hits(along, reached, right)
        return Acceptance.of(reached, right)

    @torch.no_grad()
    def fit_start(self, examples: Sequence[Example]) -> None:
        """Let the head begin where ridge regressions bring it, one matrix after the other: each foretells what those
        before it leave of the next hidden state. What the layers' matrices read is the target's last layers' as it is.

        That takes a minute, and comes to where hundreds of steps from elsewhere come to.
        """
        head = self._head
        matrices = [head.fc, *(matrix for layer in head.layers for matrix in (layer.o_proj, layer.down_proj))]
        for matrix in matrices:
            matrix.weight.zero_()
        for matrix in matrices:
            products, targets = (
                torch.zeros(matrix.in_features, columns, dtype=torch.float64)
                for columns in (matrix.in_features, matrix.out_features)
            )
            count = 0
            for at in range(0, len(examples), 32):
                batch = self._batch(examples[at : at + 32])
                inside = torch.arange(batch.tokens.shape[1])[None] < torch.tensor(batch.lengths)[:, None]
                with half_where_fast():
                    read, so_far = self._parts(matrix, batch)
                rows = read[inside].float()
                left = batch.after[inside] / head.norm.weight - so_far[inside].float()  # the norm makes `after` of it
                products += (rows.T @ rows).double()
                targets += (rows.T @ left).double()
                count += len(rows)
            damping = _RIDGE * products.diagonal().mean() * torch.eye(matrix.in_features, dtype=torch.float64)
            matrix.weight.copy_(torch.linalg.solve(products + damping, targets).T.float())

    def _parts(self, matrix: nn.Module, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What `matrix` of the head reads [B, T, K], and the sum [B, T, H] that it adds to."""
        head = self._head
        slots = head.slots(batch.tokens, batch.hidden)
        x = head.fc(slots)
        if matrix is head.fc:
            return slots, torch.zeros_like(x)
        rope = head.rope(torch.arange(batch.tokens.shape[1])[None])
        for layer in head.layers:
            attended = layer.attended(x, rope, UnrolledAttention())
            if matrix is layer.o_proj:
                return attended, x
            x = x + layer.o_proj(attended)
            gated = layer.gated(x)
            if matrix is layer.down_proj:
                return gated, x
            x = x + layer.down_proj(gated)
        raise AssertionError("not a matrix of the head")

    def _batch(self, examples: Sequence[Example]) -> _Batch:
        lengths = [self.length(example) for example in examples]
        longest, width = max(lengths), examples[0][1].shape[1]
        tokens = np.zeros((len(examples), longest), np.int64)
        hidden = np.zeros((len(examples), longest + 1, width), np.float32)
        came = np.full((len(examples), longest), -1, np.int64)
        counts = np.zeros((len(examples), longest), np.float32)
        for index, (dialogue, states) in enumerate(examples):
            count = lengths[index]
            answer = dialogue.token_ids[dialogue.first :]
            tokens[index, :count], following = answer[:-1], answer[1:]
            hidden[index, : count + 1] = states
            counts[index, :count] = np.where(repeated(dialogue.token_ids)[dialogue.first + 1 :], _REPEATED, 1.0)
            came[index, :count] = np.where(self._known[following], self._table[following], -1)
        states = torch.from_numpy(hidden)
        return _Batch(
            torch.from_numpy(tokens),
            states[:, :-1],
            states[:, 1:],
            torch.from_numpy(came),
            torch.from_numpy(counts),
            lengths,
        )
