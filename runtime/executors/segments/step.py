"""A step's inputs as one block of bytes, so that one copy uploads them; decode steps are padded to a bucket.

A CUDA graph replays launches of fixed sizes from fixed addresses. So a step of `B` single tokens runs as the bucket of
`B` or more: padding sequences have one token each, no past, and a block of their own that nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.executor import StepBatch
from runtime.executors.segments.memory import aligned

INPUTS = {
    "input_ids": np.int64, "position_ids": np.int64, "logits_rows": np.int64, "past_lens": np.int32,
    "query_starts": np.int32, "block_ids": np.int32, "block_starts": np.int32,
}  # fmt: skip


@dataclass(frozen=True)
class InputLayout:
    """Where each input begins in the block, for the largest step. `lengths` in elements."""

    offsets: Mapping[str, int]
    lengths: Mapping[str, int]
    size: int


def input_layout(max_tokens: int, max_sequences: int, max_blocks: int) -> InputLayout:
    """Room for steps of `max_tokens` tokens in `max_sequences` sequences of up to `max_blocks` blocks each."""
    lengths = input_lengths(max_tokens, max_sequences, max_tokens, max_blocks)
    offsets, end = {}, 0
    for name, count in lengths.items():
        offsets[name] = end
        end = aligned(end + count * np.dtype(INPUTS[name]).itemsize)
    return InputLayout(offsets, lengths, end)


def input_lengths(tokens: int, sequences: int, rows: int, max_blocks: int) -> dict[str, int]:
    """Elements of each input as an engine is told. A graph's shapes are fixed, so tables count as full: `max_blocks` a
    sequence, of which `block_starts` says what is read.
    """
    return {
        "input_ids": tokens, "position_ids": tokens, "logits_rows": rows, "past_lens": sequences,
        "query_starts": sequences + 1, "block_ids": sequences * max_blocks, "block_starts": sequences + 1,
    }  # fmt: skip


def buckets(max_sequences: int) -> list[int]:
    """Numbers of sequences that decode graphs are made for: 1, 2, 4, then multiples of 8, then of an eighth."""
    sizes = [size for size in (1, 2, 4) if size < max_sequences]
    size = 8
    while size < max_sequences:
        sizes.append(size)
        size += max(8, 1 << max(0, size.bit_length() - 3))
    return [*sizes, max_sequences]


def is_decode(batch: StepBatch) -> bool:
    """Whether each sequence has one token and wants its logits."""
    count = len(batch.past_lens)
    return count > 0 and len(batch.token_ids) == count == len(batch.logits_rows)


def bucket_of(count: int, sizes: list[int]) -> int:
    """The smallest bucket that holds `count` sequences."""
    return sizes[bisect_left(sizes, count)]


def pad_decode(batch: StepBatch, size: int, spare_block: int) -> StepBatch:
    """`batch`, a decode, with padding sequences up to `size`."""
    extra = size - len(batch.past_lens)
    if not extra:
        return batch
    tokens = np.arange(size)
    return StepBatch(
        token_ids=np.pad(batch.token_ids, (0, extra)),
        positions=np.pad(batch.positions, (0, extra)),
        past_lens=np.pad(batch.past_lens, (0, extra)),
        query_starts=np.arange(size + 1, dtype=np.int32),
        block_ids=np.pad(batch.block_ids, (0, extra), constant_values=spare_block),
        block_starts=np.concatenate([batch.block_starts, batch.block_starts[-1] + 1 + np.arange(extra)]).astype(
            np.int32
        ),
        max_context_len=batch.max_context_len,
        logits_rows=tokens,
        copies=batch.copies,
    )


def pack(batch: StepBatch, layout: InputLayout, target: NDArray[np.uint8]) -> int:
    """Write the inputs into `target` [layout.size]; returns how many bytes from its begin are to be uploaded.

    Raises:
        ValueError: the step is larger than the engine was built for; with the numbers.
    """
    arrays = {
        "input_ids": batch.token_ids, "position_ids": batch.positions, "logits_rows": batch.logits_rows,
        "past_lens": batch.past_lens, "query_starts": batch.query_starts, "block_ids": batch.block_ids,
        "block_starts": batch.block_starts,
    }  # fmt: skip
    if not len(batch.logits_rows):
        arrays["logits_rows"] = np.zeros(1, np.int64)
    for name, array in arrays.items():
        if len(array) > layout.lengths[name]:
            raise ValueError(f"{name} has {len(array)} elements, and the engine holds {layout.lengths[name]}")
        data = np.ascontiguousarray(array, INPUTS[name]).view(np.uint8)
        target[layout.offsets[name] : layout.offsets[name] + len(data)] = data
    return layout.size
