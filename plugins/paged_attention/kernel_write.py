"""Rotary embedding, and writing new keys and values into the paged cache, in one Triton kernel; copying of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.paged_attention.kernel_encode import store_cell
from plugins.rope.kernel import rotated


@triton.jit
def sequence_of_row(row, query_starts, num_sequences):
    """The sequence that owns row `row` of the flat batch: the last one that begins at or before it."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def rope_and_write(
    query,  # [T, num_heads * D], rows QUERY_ROW elements apart; unused without rotary embedding
    key,  # [T, Hkv * D], rows KEY_ROW apart
    value,  # [T, Hkv * DV], rows VALUE_ROW apart
    cos,  # [positions, ROTARY / 2]
    sin,
    positions,  # [T]
    past_lens,
    query_starts,
    block_ids,
    block_starts,
    query_out,  # [T, num_heads * D]
    key_cache,  # pages, as in `attend`
    value_cache,
    key_scales,
    value_scales,
    num_sequences,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_STATIC: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_STATIC: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # covers a head
    BLOCK_D: tl.constexpr,  # covers a cell's data
    BLOCK_DV: tl.constexpr,
):
    """Program (row, head): the first Hkv heads are keys and values, which go into their cells; the rest are queries."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    if ROTARY > 0:
        at = tl.load(positions + row).to(tl.int64) * (ROTARY // 2)
        cos += at
        sin += at
    if head >= NUM_KV_HEADS:
        d = tl.arange(0, BLOCK_Q)
        h = head - NUM_KV_HEADS
        offset = (row.to(tl.int64) * NUM_HEADS + h) * HEAD_SIZE
        turned = rotated(
            query + row.to(tl.int64) * QUERY_ROW + h * HEAD_SIZE, d, cos, sin, HEAD_SIZE, ROTARY, INTERLEAVED
        )
        tl.store(query_out + offset + d, turned, mask=d < HEAD_SIZE)
        return
    b = sequence_of_row(row, query_starts, num_sequences)
    position = tl.load(past_lens + b) + row - tl.load(query_starts + b)
    block = tl.load(block_ids + tl.load(block_starts + b) + position // BLOCK_SIZE).to(tl.int64)
    cell = position % BLOCK_SIZE
    page = block * NUM_KV_HEADS + head

    KEY_INT4: tl.constexpr = KEY_FORMAT == "int4" or KEY_FORMAT == "int4z"
    KEY_BYTES: tl.constexpr = HEAD_SIZE // 2 if KEY_INT4 else HEAD_SIZE
    key_head = key + row.to(tl.int64) * KEY_ROW + head * HEAD_SIZE
    d = tl.arange(0, BLOCK_D)
    low = rotated(key_head, d, cos, sin, HEAD_SIZE, ROTARY, INTERLEAVED)
    high = low
    if KEY_INT4:
        high = rotated(key_head, KEY_BYTES + d, cos, sin, HEAD_SIZE, ROTARY, INTERLEAVED)
    scales = key_scales + page * (KEY_PAGE // 2) + BLOCK_SIZE * KEY_BYTES // 2
    store_cell(
        key_cache + page * KEY_PAGE, scales, cell, low, high, BLOCK_SIZE, HEAD_SIZE, KEY_FORMAT, KEY_GROUP, KEY_STATIC,
        BLOCK_D,
    )  # fmt: skip

    VALUE_INT4: tl.constexpr = VALUE_FORMAT == "int4" or VALUE_FORMAT == "int4z"
    VALUE_BYTES: tl.constexpr = V_HEAD_SIZE // 2 if VALUE_INT4 else V_HEAD_SIZE
    value_head = value + row.to(tl.int64) * VALUE_ROW + head * V_HEAD_SIZE
    dv = tl.arange(0, BLOCK_DV)
    low = tl.load(value_head + dv, mask=dv < V_HEAD_SIZE, other=0.0)
    high = low
    if VALUE_INT4:
        high = tl.load(value_head + VALUE_BYTES + dv, mask=dv < VALUE_BYTES, other=0.0)
    scales = value_scales + page * (VALUE_PAGE // 2) + BLOCK_SIZE * VALUE_BYTES // 2
    store_cell(
        value_cache + page * VALUE_PAGE, scales, cell, low, high, BLOCK_SIZE, V_HEAD_SIZE, VALUE_FORMAT, VALUE_GROUP,
        VALUE_STATIC, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def copy_blocks(bases, pairs, block_words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair, array, part): copy block `pairs[pair, 0]` onto `pairs[pair, 1]` in the array at `bases[array]`.

    `bases` i64 [arrays] are addresses, `pairs` i32 [P, 2], blocks have `block_words` words of WORD. No source may be a
    target of the same launch.
    """
    pair = tl.program_id(0)
    base = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(WORD))
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < block_words
    data = tl.load(base + source * block_words + word, mask=inside)
    tl.store(base + target * block_words + word, data, mask=inside)


@triton.jit
def swap_blocks(bases, ids, staging, block_words, TO_STAGING: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block, array, part): block `ids[block]` of the array at `bases[array]` to or from the staging buffer.

    `staging` [blocks, arrays, block_words] is one run of bytes a block, so that one copy moves it to or from the host.
    """
    index = tl.program_id(0).to(tl.int64)
    array = tl.program_id(1)
    base = tl.load(bases + array).to(tl.pointer_type(WORD))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < block_words
    cell = base + tl.load(ids + index).to(tl.int64) * block_words + word
    staged = staging + (index * tl.num_programs(1) + array) * block_words + word
    if TO_STAGING:
        tl.store(staged, tl.load(cell, mask=inside), mask=inside)
    else:
        tl.store(cell, tl.load(staged, mask=inside), mask=inside)
