"""Launches the sampling kernels on torch tensors: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.sampling.kernel import sample as sample_kernel
from plugins.sampling.kernel_score import score as score_kernel
from plugins.sampling.kernel_verify import restrict_rows
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


def verify(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    draft_tokens: torch.Tensor,
    rows: SamplingRows,
    draws: Draws,
    draft_probs: torch.Tensor | None = None,
    *,
    block: int = _BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify drafted tokens: how many stay i32 [S], and the token after them i32 [S].

    Args:
        logits: [R, V]; sequence s has the rows `row_starts[s]` to `row_starts[s + 1]`, one more than drafted tokens.
        row_starts: i32 [S + 1].
        draft_tokens: i32 [R - S], the sequences end to end.
        rows: for each row of `logits`.
        draws: for each sequence; position is the first drafted token's.
        draft_probs: f32 [R - S, V], what the drafts were sampled from; None: they were certain (n-gram, greedy).
    """
    sequences = len(row_starts) - 1
    new = {"device": logits.device}
    stats = torch.zeros(len(logits), 2, dtype=torch.float32, **new)
    edges = torch.zeros(len(logits), 3, dtype=torch.int64, **new)
    accepted = torch.empty(sequences, dtype=torch.int32, **new)
    tokens = torch.empty(sequences, dtype=torch.int32, **new)
    if sequences:
        size = logits.shape[1]
        restrict_rows[(len(logits),)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, stats, edges, size, BLOCK=block, num_warps=8
        )
        verify_kernel[(sequences,)](
            logits, row_starts, draft_tokens, stats if draft_probs is None else draft_probs, rows.temperature, stats,
            edges, draws.seed, draws.sequence, draws.position, accepted, tokens, size, CERTAIN=draft_probs is None,
            TOKEN_STREAM=TOKEN_STREAM, ACCEPT_STREAM=ACCEPT_STREAM, RESIDUAL_STREAM=RESIDUAL_STREAM, BLOCK=block,
            num_warps=8,
        )  # fmt: skip
    return accepted, tokens
