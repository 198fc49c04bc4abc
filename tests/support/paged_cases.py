"""Random paged-attention batches, and a dense attention to hold their results against."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class PagedCase:
    """A batch with its caches filled up to `past_lens`, and the same sequences as dense keys and values."""

    attributes: dict
    inputs: dict[str, NDArray]
    dense_keys: list[NDArray] = field(default_factory=list)  # one [past + new, Hkv, D] a sequence
    dense_values: list[NDArray] = field(default_factory=list)


def make_case(
    sequences: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    v_head_size: int | None = None,
    block_size: int = 4,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    spare_blocks: int = 3,
    seed: int = 0,
) -> PagedCase:
    """A batch of sequences (past, new) whose blocks lie scattered over the cache."""
    rng = np.random.default_rng(seed)
    v_head_size = v_head_size or head_size
    attributes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "v_head_size": v_head_size,
        "scale": head_size**-0.5,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "block_size": block_size,
    }
    counts = [-(-(past + new) // block_size) for past, new in sequences]
    num_blocks = sum(counts) + spare_blocks
    block_ids = rng.permutation(num_blocks)[: sum(counts)].astype(np.int32)
    block_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    # Cells that no sequence owns hold large values: reading one shows.
    key_cache = rng.standard_normal((num_blocks, num_kv_heads, block_size, head_size), np.float32) * 50
    value_cache = rng.standard_normal((num_blocks, num_kv_heads, block_size, v_head_size), np.float32) * 50
    case = PagedCase(attributes, {})
    new_keys, new_values = [], []
    for b, (past, new) in enumerate(sequences):
        keys = rng.standard_normal((past + new, num_kv_heads, head_size), np.float32)
        values = rng.standard_normal((past + new, num_kv_heads, v_head_size), np.float32)
        table = block_ids[block_starts[b] : block_starts[b + 1]]
        for position in range(past):
            key_cache[table[position // block_size], :, position % block_size] = keys[position]
            value_cache[table[position // block_size], :, position % block_size] = values[position]
        case.dense_keys.append(keys)
        case.dense_values.append(values)
        new_keys.append(keys[past:].reshape(new, num_kv_heads * head_size))
        new_values.append(values[past:].reshape(new, num_kv_heads * v_head_size))
    T = sum(new for _, new in sequences)
    case.inputs = {
        "query": rng.standard_normal((T, num_heads * head_size), np.float32),
        "key": np.concatenate(new_keys),
        "value": np.concatenate(new_values),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "past_lens": np.array([past for past, _ in sequences], np.int32),
        "query_starts": np.concatenate([[0], np.cumsum([new for _, new in sequences])]).astype(np.int32),
        "block_ids": block_ids,
        "block_starts": block_starts,
        "max_context_len": np.array(max(past + new for past, new in sequences), np.int32),
    }
    if sinks:
        case.inputs["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    if alibi:
        case.inputs["alibi_slopes"] = (2.0 ** -np.arange(1, num_heads + 1)).astype(np.float32)
    return case


def dense_attention(case: PagedCase) -> NDArray[np.float64]:
    """Softmax attention of each row over its sequence's dense keys, one row and one head at a time, in f64."""
    a, inputs = case.attributes, case.inputs
    group = a["num_heads"] // a["num_kv_heads"]
    query = inputs["query"].astype(np.float64).reshape(-1, a["num_heads"], a["head_size"])
    out = np.zeros((query.shape[0], a["num_heads"], a["v_head_size"]))
    row = 0
    for b, past in enumerate(inputs["past_lens"].tolist()):
        keys, values = case.dense_keys[b].astype(np.float64), case.dense_values[b].astype(np.float64)
        for position in range(past, len(keys)):
            first = max(0, position + 1 - a["sliding_window"]) if a["sliding_window"] else 0
            seen = np.arange(first, position + 1)
            for head in range(a["num_heads"]):
                logits = keys[seen, head // group] @ query[row, head] * a["scale"]
                if a["softcap"]:
                    logits = a["softcap"] * np.tanh(logits / a["softcap"])
                if "alibi_slopes" in inputs:
                    logits = logits - float(inputs["alibi_slopes"][head]) * (position - seen)
                if "sinks" in inputs:
                    logits = np.append(logits, float(inputs["sinks"][head]))
                weights = np.exp(logits - logits.max())
                weights = (weights / weights.sum())[: len(seen)]
                out[row, head] = weights @ values[seen, head // group]
            row += 1
    return out.reshape(row, -1)
