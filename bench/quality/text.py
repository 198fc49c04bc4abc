"""Text: perplexity, and how far an engine's distributions lie from a reference's, position by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.quality.reading import Reader, log_softmax
from builder.parity import TEXT, WINDOW

_ROWS = 64  # positions compared at once
_BUCKET = 128  # positions of a bucket of the long window


@dataclass(frozen=True, slots=True)
class Positions:
    """Of each position read: the surprise at the next token (nats; NaN where none follows), and, beside a reference,
    its own surprise, KL(reference || engine), and whether both like the same token best."""

    surprise: NDArray[np.float64]
    reference: NDArray[np.float64] | None = None
    divergence: NDArray[np.float64] | None = None
    agree: NDArray[np.bool_] | None = None


def read_text(engine: Reader, reference: Reader | None, windows: list[list[int]]) -> list[Positions]:
    """Read each window from its start with both engines, side by side."""
    return [_read_window(engine, reference, window) for window in windows]


def headline_windows(engine: Reader, limit: int) -> list[list[int]]:
    """The parity text in windows of 512 tokens, each with the tokenizer's prefix; `limit` windows at most."""
    tokens, prefix = engine.encode(TEXT.read_text(encoding="utf-8").replace("\n---\n", "\n")), engine.prefix
    width = max(2, min(WINDOW, engine.manifest.limits.max_context_len) - len(prefix))
    starts = range(0, max(1, len(tokens) - width // 2), width)
    return [prefix + tokens[start : start + width] for start in starts][:limit]


def long_window(engine: Reader, longest: int) -> list[int]:
    """As much of the text as fits one context, up to `longest` tokens."""
    tokens = engine.encode(TEXT.read_text(encoding="utf-8").replace("\n---\n", "\n"))
    return (engine.prefix + tokens)[: min(engine.manifest.limits.max_context_len, longest)]


def summarize(parts: list[Positions]) -> dict[str, float | int]:
    """The figures over all positions."""
    surprise = np.concatenate([part.surprise for part in parts])
    figures: dict[str, float | int] = {
        "positions": len(surprise),
        "perplexity": float(math.exp(np.nanmean(surprise))),
    }
    if all(part.divergence is not None for part in parts):
        divergence = np.concatenate([part.divergence for part in parts if part.divergence is not None])
        reference = np.concatenate([part.reference for part in parts if part.reference is not None])
        agree = np.concatenate([part.agree for part in parts if part.agree is not None])
        figures |= {
            "reference_perplexity": float(math.exp(np.nanmean(reference))),
            "mean_kl": float(divergence.mean()),
            "p99_kl": float(np.quantile(divergence, 0.99)),
            "top1_agreement": float(agree.mean()),
        }
    return figures


def by_position(part: Positions) -> list[dict[str, float | int]]:
    """The long window in buckets of 128 positions: where errors grow with the context."""
    buckets = []
    for start in range(0, len(part.surprise), _BUCKET):
        rows = slice(start, start + _BUCKET)
        if np.isnan(part.surprise[rows]).all():
            continue
        entry: dict[str, float | int] = {"position": start, "surprise": float(np.nanmean(part.surprise[rows]))}
        if part.divergence is not None:
            entry["mean_kl"] = float(part.divergence[rows].mean())
        buckets.append(entry)
    return buckets


def _read_window(engine: Reader, reference: Reader | None, window: list[int]) -> Positions:
    size = engine.manifest.limits.max_num_batched_tokens
    if reference is not None:
        size = min(size, reference.manifest.limits.max_num_batched_tokens)
    followers = np.array([*window[1:], -1])
    surprise, theirs_surprise, divergence, agree = [], [], [], []
    others = None if reference is None else reference.chunks(window, size=size)
    at = 0
    for ours in engine.chunks(window, size=size):
        other = None if others is None else next(others)
        for start in range(0, len(ours), _ROWS):
            rows = slice(start, start + _ROWS)
            mine, next_tokens = log_softmax(ours[rows]), followers[at + start : at + start + len(ours[rows])]
            surprise.append(_surprise(mine, next_tokens))
            if other is not None:
                theirs = log_softmax(other[rows])
                theirs_surprise.append(_surprise(theirs, next_tokens))
                divergence.append(np.maximum((np.exp(theirs) * (theirs - mine)).sum(-1), 0))
                agree.append(theirs.argmax(-1) == mine.argmax(-1))
        at += len(ours)
    if reference is None:
        return Positions(np.concatenate(surprise))
    return Positions(*(np.concatenate(parts) for parts in (surprise, theirs_surprise, divergence, agree)))


def _surprise(log_probabilities: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    found = -log_probabilities[np.arange(len(tokens)), tokens]
    return np.where(tokens < 0, np.nan, found)
