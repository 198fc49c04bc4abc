"""PagedAttention's kernels: what a step reads from the KV cache a second, in each format.

A step is timed over enough copies of the cache that no processor cache holds one, as it goes through the layers of a
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from plugins.paged_attention.cpu_layout import to_cpu
from plugins.paged_attention.native import BLOCK_SIZE, formats
from plugins.paged_attention.native_library import Step, empty_cache

if TYPE_CHECKING:
    from bench.kernels_bench import Figure, Settings

FORMATS = ("f32", "f16", "bf16", "int8", "int8:int4", "int4", "fp8_e4m3", "fp8_e5m2")
CACHE_BYTES = 192 << 20


class Case(NamedTuple):
    """Sequences of `past` tokens that take `new` more, on a model's heads."""

    name: str
    sequences: int
    past: int
    new: int
    num_heads: int
    num_kv_heads: int
    head_size: int


# SmolLM2-135M's heads, and those of a model of 1B class (Llama 3.2).
CASES = (
    Case("decode 16 x 1,000", 16, 1000, 1, 9, 3, 64),
    Case("decode 1 x 8,000", 1, 8000, 1, 9, 3, 64),
    Case("decode 4 x 4,000, 1B", 4, 4000, 1, 32, 8, 64),
    Case("verify 8 of 1,000", 4, 1000, 8, 9, 3, 64),
    Case("prefill 512", 1, 0, 512, 9, 3, 64),
)


def attention(settings: Settings) -> Iterator[Figure]:
    """Attention over every KV format; GB/s are those of cells that are read and written."""
    from bench.kernels_bench import Figure

    for case in CASES:
        for kv in FORMATS:
            steps, read = make_steps(case, kv)
            seconds = _time(steps, settings)
            tokens = case.past + (case.new + 1) / 2
            ops = int(4 * case.sequences * case.new * tokens * case.num_heads * case.head_size)
            rows = case.sequences * case.new
            yield Figure("attention", f"{kv}, {case.name}", rows, seconds, read, ops, "bf16")


def make_steps(case: Case, kv: str, total: int = CACHE_BYTES) -> tuple[list[Step], int]:
    """Steps like those of a model's layers, and the bytes of cells that one of them reads."""
    attributes: dict[str, Any] = {
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_size": case.head_size,
        "v_head_size": case.head_size,
        "scale": case.head_size**-0.5,
        "kv_dtype": kv,
    }
    rng = np.random.default_rng(0)
    per_sequence = -(-(case.past + case.new) // BLOCK_SIZE)
    blocks = case.sequences * per_sequence
    T = case.sequences * case.new
    forms = formats(attributes)
    cell = sum(form.cell_bytes(case.head_size) for form in forms)
    layer_bytes = blocks * BLOCK_SIZE * case.num_kv_heads * cell
    layers = max(2, total // layer_bytes) if case.past else 4
    # All layers' caches side by side, as an executor allocates them: on huge pages, whatever one of them takes.
    both = [empty_cache(form, layers * blocks, case.num_kv_heads, BLOCK_SIZE, case.head_size) for form in forms]
    steps = []
    for layer in range(layers):
        caches = [cache[layer * blocks : (layer + 1) * blocks] for cache in both]
        for form, cache, key in zip(forms, caches, (True, False), strict=True):
            page = form.empty_cache(1, 1, BLOCK_SIZE, case.head_size)
            vectors = rng.standard_normal((BLOCK_SIZE, 1, case.head_size), np.float32)
            form.write(page, np.zeros(BLOCK_SIZE, int), np.arange(BLOCK_SIZE), vectors, BLOCK_SIZE)
            cache[:] = to_cpu(form, page, case.head_size, key=key)
        inputs = {
            "query": rng.standard_normal((T, case.num_heads * case.head_size), np.float32),
            "key": rng.standard_normal((T, case.num_kv_heads * case.head_size), np.float32),
            "value": rng.standard_normal((T, case.num_kv_heads * case.head_size), np.float32),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "past_lens": np.full(case.sequences, case.past, np.int32),
            "query_starts": np.arange(0, T + 1, case.new, dtype=np.int32),
            "block_ids": rng.permutation(blocks).astype(np.int32),
            "block_starts": np.arange(0, blocks + 1, per_sequence, dtype=np.int32),
        }
        steps.append(Step(inputs, attributes))
    return steps, case.sequences * (case.past + case.new) * case.num_kv_heads * cell


def _time(steps: list[Step], settings: Settings) -> float:
    """Seconds of one step: the best round over all copies, of the rounds that fit."""
    best, end, rounds = float("inf"), time.perf_counter() + settings.seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for step in steps:
            step.run(settings.threads)
        best = min(best, (time.perf_counter() - start) / len(steps))
        rounds += 1
    return best
