"""Microbenchmark of the sampler: 64 rows of a 49,152 vocabulary, by kind of request and mixed. One core, NumPy only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

ROWS, VOCAB = 64, 49_152

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 50": {"top_k": 50, "temperature": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40, top_p 0.95, temperature 0.8": {"top_k": 40, "top_p": 0.95, "temperature": 0.8},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9, "top_k": 1000},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "temperature": 0.8, "top_p": 0.95},
    "logprobs 5, greedy": {"temperature": 0.0, "logprobs": 5},
    "logprobs 5, top_p 0.9": {"top_p": 0.9, "logprobs": 5},
    "logit_bias, min_tokens": {"logit_bias": {1: 2.0, 7: -3.0}, "min_tokens": 8, "top_k": 50},
}
# What the rows of the mixed batch ask for, in turn.
MIXED = ("greedy", "temperature 0.7", "top_k 50", "top_p 0.9", "top_k 40, top_p 0.95, temperature 0.8", "min_p 0.05")
MIXED += ("penalties", "logprobs 5, greedy")


def synthetic_logits(rows: int = ROWS, vocab: int = VOCAB, seed: int = 0):
    """Logits f32 [rows, vocab] of a language model's shape: a wide bulk, and some likely tokens above it."""
    import numpy as np

    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 2.5, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[rng.integers(0, vocab, 60)] += np.sort(rng.exponential(4.0, 60)).astype(np.float32)
    return logits


def bench_sampler(
    logits=None, *, seconds: float = 1.0, progress: Callable[[str, float], None] | None = None
) -> dict[str, float]:
    """Milliseconds for one `Sampler.sample` of all rows, by kind and "mixed": the best over `seconds` of each.

    `logits` f32 [R, V]: real ones where they are at hand; else `synthetic_logits()`. The prompt has 500 tokens.
    """
    import numpy as np

    from runtime.sampler import Sampler
    from runtime.sampling_params import SamplingParams

    logits = synthetic_logits() if logits is None else logits
    rows, vocab = logits.shape
    sampler = Sampler(vocab, [2])
    prompt = np.random.default_rng(1).integers(0, vocab, 500).tolist()
    batches = {kind: [options] * rows for kind, options in KINDS.items()}
    batches["mixed"] = [KINDS[MIXED[i % len(MIXED)]] for i in range(rows)]
    results = {}
    for kind, requests in batches.items():
        states = [sampler.new_state(SamplingParams(seed=i, **options), prompt) for i, options in enumerate(requests)]
        times = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or len(times) < 5:
            start = time.thread_time()
            sampled = sampler.sample(logits, states)
            for state, token in zip(states, sampled, strict=True):
                state.append(token.token_id, token.logprob)
            times.append(time.thread_time() - start)
        results[kind] = min(times) * 1e3
        if progress is not None:
            progress(kind, results[kind])
    return results


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    bench_sampler(progress=lambda kind, ms: print(f"{kind:45s} {ms:7.3f} ms"))
