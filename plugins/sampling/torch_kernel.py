"""Launches the sampling kernels on torch tensors: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.sampling.kernel import sample as sample_kernel
from plugins.sampling.kernel_score import score as score_kernel
from plugins.sampling.kernel_verify import verify as verify_kernel

# Streams of random numbers, as `runtime/philox.py` numbers them.
TOKEN_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 0, 1, 2
_BLOCK = 1024


@dataclass(frozen=True)
class SamplingRows:
    """What each of R rows is sampled with: temperature f32 (0: greedy; below 0: not sampled), top_k i32 (0: all), top_p
    f32, min_p f32."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True)
class Draws:
    """Whose random numbers: seed i64, sequence index i32, and position i32 in the output of the (first) token."""

    seed: torch.Tensor
    sequence: torch.Tensor
    position: torch.Tensor


def sample(
    logits: torch.Tensor, rows: SamplingRows, draws: Draws, *, most: int = 0, block: int = _BLOCK
) -> torch.Tensor:
    """One token i32 for each row of `logits` [R, V].

    -1 where the row is not sampled or its maximum is not finite; -2 where top_k, top_p or min_p leave more than `most`
    candidates (0: never).
    """
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        sample_kernel[(len(logits),)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, draws.seed, draws.sequence, draws.position,
            tokens, logits.shape[1], STREAM=TOKEN_STREAM, MOST=most, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return tokens


@dataclass(frozen=True)
class Scores:
    """What `score` tells of R rows: peak, sum of exp(logit - peak) and the token's logit f32 [R, 3], the token's rank
    i32 [R], ids i32 and logits f32 [R, W] of the likeliest tokens."""

    stats: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


def score(
    logits: torch.Tensor, tokens: torch.Tensor, num_tops: torch.Tensor, *, width: int = 20, block: int = _BLOCK
) -> Scores:
    """The scores of one token i32 [R] for each row of `logits` [R, V], and of its `num_tops` i32 [R] likeliest.

    Rows whose token or number is negative are left as they are: zeros.
    """
    new = {"device": logits.device}
    count = len(logits)
    scores = Scores(
        torch.zeros(count, 3, dtype=torch.float32, **new), torch.zeros(count, dtype=torch.int32, **new),
        torch.zeros(count, width, dtype=torch.int32, **new), torch.zeros(count, width, dtype=torch.float32, **new),
    )  # fmt: skip
    if count:
        score_kernel[(count,)](
            logits, tokens, num_tops, scores.stats, scores.ranks, scores.top_ids, scores.top_values, logits.shape[1],
            width, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return scores


@dataclass(frozen=True)
class Drafts:
    """Tokens of D rows that were drawn at random, and what from: rows i32 [D], tokens i32 [D], temperatures f32 [D]
    (above 0), starts i32 [D + 1] into ids i32 [N], ascending in each draft, and their probabilities f32 [N]."""

    rows: torch.Tensor
    tokens: torch.Tensor
    temperatures: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


def verify(
    logits: torch.Tensor, rows: SamplingRows, draws: Draws, drafts: Drafts, tokens: torch.Tensor, *, block: int = _BLOCK
) -> None:
    """Set `tokens` i32 [R] of the drafted rows of `logits` [R, V]: the drafted token, or one in its place.

    -1 where the row's maximum is not finite. The temperatures of `rows` are not read: `sample`, to which these rows are
    not to be sampled, reads those.
    """
    if len(drafts.rows):
        verify_kernel[(len(drafts.rows),)](
            logits, drafts.rows, drafts.tokens, drafts.temperatures, drafts.starts, drafts.ids, drafts.probs,
            rows.top_k, rows.top_p, rows.min_p, draws.seed, draws.sequence, draws.position, tokens, logits.shape[1],
            ACCEPT_STREAM=ACCEPT_STREAM, RESIDUAL_STREAM=RESIDUAL_STREAM, BLOCK=block, num_warps=8,
        )  # fmt: skip
