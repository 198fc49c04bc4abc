"""Small executors with a real paged KV cache, for tests: a block error shows as a wrong token.

`TinyModelExecutor` is a random transformer (RMSNorm, RoPE, GQA, gated MLP) through the plugins' reference attention.
`HashModelExecutor` is cheaper still: its cells hold token ids, and the next token is a hash of the whole history read
back from the blocks. Both are batch-invariant to the bit: a token's logits depend on its history alone, never on
chunking or on its neighbours, so equality tests are exact. Cells never written hold NaN (-1 in the hash model).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention.reference import reference as paged_attention
from runtime.errors import PlancastError
from runtime.executor import StepBatch
from runtime.kv_layout import KvLayer, KvLayout


class TinyModelExecutor:
    """A random transformer in NumPy. Implements `runtime.executor.Executor`.

    Every product is taken a row at a time and attention a query token at a time, so that the arithmetic of one token
    is the same in any batch and under any chunking.
    """

    def __init__(
        self,
        seed: int = 0,
        vocab_size: int = 96,
        *,
        num_layers: int = 2,
        hidden_size: int = 32,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        block_size: int = 4,
        num_blocks: int = 0,
    ):
        if hidden_size % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"hidden_size {hidden_size}, num_heads {num_heads}, num_kv_heads {num_kv_heads} do not fit"
            )
        self.vocab_size = vocab_size
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, hidden_size // num_heads
        layer = KvLayer(
            num_kv_heads=num_kv_heads,
            key_head_size=self.head_size,
            value_head_size=self.head_size,
            key_dtype="f32",
            value_dtype="f32",
        )
        self.kv_layout = KvLayout(block_size=block_size, layers=(layer,) * num_layers)
        rng = np.random.default_rng(seed)

        def weight(rows: int, columns: int) -> NDArray[np.float32]:
            return (rng.standard_normal((rows, columns)) * 1.4 / np.sqrt(rows)).astype(np.float32)

        q_size, kv_size = num_heads * self.head_size, num_kv_heads * self.head_size
        self.embedding = rng.standard_normal((vocab_size, hidden_size)).astype(np.float32)
        self.head = weight(hidden_size, vocab_size) * 3
        self.layers = [
            {
                "qkv": weight(hidden_size, q_size + 2 * kv_size),
                "out": weight(q_size, hidden_size),
                "gate": weight(hidden_size, 2 * hidden_size),
                "up": weight(hidden_size, 2 * hidden_size),
                "down": weight(2 * hidden_size, hidden_size),
            }
            for _ in range(num_layers)
        ]
        self.caches: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []
        self.steps = 0
        if num_blocks:
            self.allocate(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.caches[0][0].shape[0] if self.caches else 0

    def allocate(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise PlancastError(f"cannot allocate {num_blocks} KV blocks: at least 1 is needed")
        shape = (num_blocks, self.num_kv_heads, self.kv_layout.block_size, self.head_size)
        self.caches = [
            (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)) for _ in self.kv_layout.layers
        ]

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        check_batch(batch, self.num_blocks, self.kv_layout.block_size)
        self.steps += 1
        for source, target in batch.copies:
            for keys, values in self.caches:
                keys[target], values[target] = keys[source], values[source]
        # One query token a "sequence": the sums over a token's context then never depend on the chunk's size.
        tables = [
            batch.block_ids[batch.block_starts[b] : batch.block_starts[b + 1]]
            for b in np.repeat(np.arange(len(batch.past_lens)), np.diff(batch.query_starts))
        ]
        T = len(batch.token_ids)
        block_starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32)
        block_ids = np.concatenate(tables)
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        x = self.embedding[batch.token_ids]
        for weights, (keys, values) in zip(self.layers, self.caches, strict=True):
            qkv = _rows_times(_rms_norm(x), weights["qkv"])
            query, key, value = np.split(qkv, [q_size, q_size + kv_size], axis=1)
            attention = paged_attention(
                _rope(query, batch.positions, self.head_size),
                _rope(key, batch.positions, self.head_size),
                value,
                keys,
                values,
                batch.positions.astype(np.int32),
                np.arange(T + 1, dtype=np.int32),
                block_ids,
                block_starts,
                batch.max_context_len,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                v_head_size=self.head_size,
                scale=self.head_size**-0.5,
                block_size=self.kv_layout.block_size,
            )
            x = x + _rows_times(attention, weights["out"])
            normed = _rms_norm(x)
            gate = _rows_times(normed, weights["gate"])
            x = x + _rows_times(gate / (1 + np.exp(-gate)) * _rows_times(normed, weights["up"]), weights["down"])
        output = self.output_of(_rms_norm(x[batch.logits_rows]))
        if np.isnan(output).any():
            raise AssertionError("NaN logits: a cell was read that its sequence never wrote")
        return output

    def output_of(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """From the last hidden states [R, H] to what a step returns."""
        return _rows_times(hidden, self.head)

    def read_alone(self, tokens: list[int]) -> NDArray[np.float32]:
        """What a step returns [T, V] for every token of a text that is read alone and at once. Overwrites the cache."""
        size, length = self.kv_layout.block_size, len(tokens)
        table = np.arange(-(-length // size), dtype=np.int32)
        batch = StepBatch(
            np.array(tokens), np.arange(length), np.array([0], np.int32), np.array([0, length], np.int32), table,
            np.array([0, len(table)], np.int32), length, np.arange(length),
        )  # fmt: skip
        return np.array(self.run(batch))

    def read_block(self, block_id: int) -> bytes:
        return b"".join(cache[block_id].tobytes() for pair in self.caches for cache in pair)

    def write_block(self, block_id: int, data: bytes) -> None:
        cells = np.frombuffer(data, np.float32).reshape(len(self.caches), 2, *self.caches[0][0].shape[1:])
        for (keys, values), (new_keys, new_values) in zip(self.caches, cells, strict=True):
            keys[block_id], values[block_id] = new_keys, new_values

    def poison(self, block_ids: Iterable[int]) -> None:
        """Fill blocks that nobody owns with NaN, so that a stale read shows."""
        ids = list(block_ids)
        for keys, values in self.caches:
            keys[ids], values[ids] = np.nan, np.nan

    def close(self) -> None:
        self.caches = []


class TinyEmbedder(TinyModelExecutor):
    """The random transformer without its head: a step returns the last hidden states f32 [R, H]."""

    def output_of(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return hidden


class HashModelExecutor:
    """A language model without arithmetic: the likeliest next token is a hash of the history stored in the blocks.

    A cell holds its token id. Reading the history back through the block table and comparing the stored positions
    makes every stale, shared-and-overwritten or lost block a wrong token or an AssertionError.
    """

    def __init__(self, vocab_size: int = 50, *, block_size: int = 4, num_blocks: int = 0, seed: int = 0):
        self.vocab_size = vocab_size
        self.seed = seed
        layer = KvLayer(num_kv_heads=1, key_head_size=1, value_head_size=1, key_dtype="f32", value_dtype="f32")
        self.kv_layout = KvLayout(block_size=block_size, layers=(layer,))
        self.cells = np.zeros((0, 2, block_size), np.int64)  # token id, position
        self.steps = 0
        if num_blocks:
            self.allocate(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.cells.shape[0]

    def allocate(self, num_blocks: int) -> None:
        self.cells = np.full((num_blocks, 2, self.kv_layout.block_size), -1, np.int64)

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        block_size = self.kv_layout.block_size
        check_batch(batch, self.num_blocks, block_size)
        self.steps += 1
        for source, target in batch.copies:
            self.cells[target] = self.cells[source]
        for b, past in enumerate(batch.past_lens.tolist()):
            rows = slice(int(batch.query_starts[b]), int(batch.query_starts[b + 1]))
            table = batch.block_ids[batch.block_starts[b] : batch.block_starts[b + 1]]
            positions = np.arange(past, past + rows.stop - rows.start)
            self.cells[table[positions // block_size], 0, positions % block_size] = batch.token_ids[rows]
            self.cells[table[positions // block_size], 1, positions % block_size] = positions
        wanted = set(batch.logits_rows.tolist())
        histories: list[NDArray[np.int64]] = []
        for b, past in enumerate(batch.past_lens.tolist()):
            start, end = int(batch.query_starts[b]), int(batch.query_starts[b + 1])
            table = batch.block_ids[batch.block_starts[b] : batch.block_starts[b + 1]]
            stored = self.cells[table].transpose(1, 0, 2).reshape(2, -1)[:, : past + end - start]
            if (stored[1] != np.arange(stored.shape[1])).any():
                raise AssertionError(f"sequence {b} read a block that is not its own: positions {stored[1].tolist()}")
            for t in range(start, end):
                if t in wanted:
                    histories.append(stored[0, : past + t - start + 1])
        return self.output_of(batch, histories)

    def output_of(self, batch: StepBatch, histories: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        """What a step returns for the rows with these histories."""
        logits = np.zeros((len(histories), self.vocab_size), np.float32)
        for row, history in enumerate(histories):
            logits[row] = self.logits_after(history)
        return logits

    def logits_after(self, history: NDArray[np.int64] | list[int]) -> NDArray[np.float32]:
        """The logits f32 [vocab_size] after a history of token ids, computed from the ids alone."""
        digest = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8, salt=b"%d" % self.seed)
        return np.random.default_rng(int.from_bytes(digest.digest(), "little")).random(self.vocab_size, np.float32) * 8

    def read_block(self, block_id: int) -> bytes:
        return self.cells[block_id].tobytes()

    def write_block(self, block_id: int, data: bytes) -> None:
        self.cells[block_id] = np.frombuffer(data, np.int64).reshape(2, -1)

    def poison(self, block_ids: Iterable[int]) -> None:
        """Forget what blocks that nobody owns held."""
        self.cells[list(block_ids)] = -1

    def close(self) -> None:
        self.cells = self.cells[:0]


def check_batch(batch: StepBatch, num_blocks: int, block_size: int) -> None:
    """Assert what `StepBatch` promises, and that no two sequences write one cell."""
    T, B = len(batch.token_ids), len(batch.past_lens)
    assert T > 0
    assert B > 0
    assert batch.positions.dtype == batch.token_ids.dtype == batch.logits_rows.dtype == np.int64
    for array in (batch.past_lens, batch.query_starts, batch.block_ids, batch.block_starts):
        assert array.dtype == np.int32
    assert batch.query_starts.shape == batch.block_starts.shape == (B + 1,)
    assert batch.query_starts[0] == batch.block_starts[0] == 0
    assert batch.query_starts[-1] == T
    assert batch.block_starts[-1] == len(batch.block_ids)
    lengths = np.diff(batch.query_starts)
    assert (lengths > 0).all(), "a sequence without new tokens"
    assert (np.diff(batch.block_starts) * block_size >= batch.past_lens + lengths).all(), "a table is too short"
    assert ((batch.block_ids >= 0) & (batch.block_ids < num_blocks)).all()
    expected = np.concatenate([np.arange(p, p + q) for p, q in zip(batch.past_lens, lengths, strict=True)])
    assert (batch.positions == expected).all()
    assert batch.max_context_len == (batch.past_lens + lengths).max()
    assert (np.diff(batch.logits_rows) > 0).all()
    assert not len(batch.logits_rows) or (batch.logits_rows[0] >= 0 and batch.logits_rows[-1] < T)
    owner = np.repeat(np.arange(B), lengths)
    cells = batch.block_ids[batch.block_starts[owner] + batch.positions // block_size].astype(np.int64)
    cells = cells * block_size + batch.positions % block_size
    assert len(np.unique(cells)) == T, "two tokens write one cell"


def _rows_times(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [T, K] @ weight [K, N], one row a product: the same bits for any T."""
    return np.matmul(x[:, None, :], weight)[:, 0]


def _rms_norm(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def _rope(x: NDArray[np.float32], positions: NDArray[np.int64], head_size: int) -> NDArray[np.float32]:
    """Rotate x [T, H * head_size] by its positions (half-split, base 10,000)."""
    half = head_size // 2
    angles = positions[:, None].astype(np.float64) * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x.reshape(len(x), -1, head_size), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
