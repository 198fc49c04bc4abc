"""What the runtime asks of a compiled engine: one protocol, one input type.

A step is one pass of the model over a flat, unpadded batch: sequences lie end to end, `query_starts` says where each
begins, and the block tables are CSR. Several query tokens on a sequence with past serve chunked prefill and
speculative verification alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.kv_layout import KvLayout


@dataclass(slots=True)
class StepBatch:
    """One step's inputs. T tokens in B sequences, N blocks in all tables, R rows that want logits."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    past_lens: NDArray[np.int32]  # [B] tokens already in the cache
    query_starts: NDArray[np.int32]  # [B+1] where each sequence's tokens begin; the last is T
    block_ids: NDArray[np.int32]  # [N] the tables end to end, covering past and new tokens
    block_starts: NDArray[np.int32]  # [B+1]
    max_context_len: int  # the largest past + new of any sequence
    logits_rows: NDArray[np.int64]  # [R] indices into T, ascending
    hidden_states: NDArray[np.float32] | None = None  # [T, H]: of a head's step, what its tokens come with
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) blocks, copied before the pass


@dataclass(slots=True)
class DrawnDrafts:
    """Drafted tokens of D of a step's rows that were drawn at random, and what from: N tokens with probabilities."""

    rows: NDArray[np.int32]  # [D] ascending: the rows whose logits say what the drafted tokens are worth
    tokens: NDArray[np.int32]  # [D]
    starts: NDArray[np.int32]  # [D+1] where each one's distribution begins; the last is N
    ids: NDArray[np.int32]  # [N] ascending in each distribution
    probs: NDArray[np.float32]  # [N]


@dataclass(slots=True)
class RowSampling:
    """How a device samples a step's R rows of logits. A row with a negative temperature is not sampled: its logits are
    wanted. The numbers mean what `SamplingParams` and `runtime/philox.py` say."""

    temperatures: NDArray[np.float32]  # [R]; 0: the largest logit
    top_ks: NDArray[np.int32]  # [R]; 0: all
    top_ps: NDArray[np.float32]  # [R]
    min_ps: NDArray[np.float32]  # [R]
    seeds: NDArray[np.uint64]  # [R]
    sequences: NDArray[np.int32]  # [R] index of the sequence in its request
    positions: NDArray[np.int32]  # [R] of the token in the output
    # [R]: of the token and of so many likeliest ones the log probabilities are wanted; negative: of none
    num_tops: NDArray[np.int32]
    # Rows at which a drafted token stays, or another takes its place: speculative sampling, in place of sampling.
    drafts: DrawnDrafts | None = None


@dataclass(slots=True)
class RowScores:
    """Log probabilities of a step's R rows: arrays that only rows which asked for them fill."""

    log_sums: NDArray[np.float64]  # [R] log(sum(exp(logits)))
    values: NDArray[np.float32]  # [R] the token's logit
    ranks: NDArray[np.int32]  # [R] 1 + the number of likelier tokens
    top_ids: NDArray[np.int32]  # [R, W] the likeliest, largest first
    top_values: NDArray[np.float32]  # [R, W] their logits


@dataclass(slots=True)
class SampledRows:
    """What a device sampled from a step's R rows."""

    tokens: NDArray[np.int32]  # [R]; negative: the device has none, and the row's logits are there
    scores: RowScores | None  # None where no row asked


@runtime_checkable
class Executor(Protocol):
    """Runs steps of one engine on one device. Not thread-safe: one owner calls it.

    Of an engine that embeds, read "last hidden states [R, H]" where it says logits.

    Block ids run from 0 to `num_blocks` - 1. The executor owns the cache's memory and nothing of its bookkeeping.
    """

    kv_layout: KvLayout
    vocab_size: int
    # f32 [R, H]: the hidden states that the last run's logits were read off, of a target with a head and of a head;
    # reused by the next run, as the logits are. None of all others, which need not have the attribute.
    # hidden_states: NDArray[np.float32] | None
    # def warm_up(self) -> None: prepares what a first step would have to, once after `allocate`; where there is one.

    @property
    def num_blocks(self) -> int:
        """Blocks allocated so far (0 before `allocate`)."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache. Raises `PlancastError` with the numbers where memory does not suffice."""
        ...

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Apply `batch.copies`, write the new tokens' keys and values, and return logits f32 [R, vocab_size].

        The array may be reused by the next call: copy what must outlive it.
        """
        ...

    def read_block(self, block_id: int) -> bytes:
        """The block's cells of every layer, for the host swap tier."""
        ...

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned."""
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


@runtime_checkable
class DeviceExecutor(Executor, Protocol):
    """An executor whose steps run beside the host, and that may sample what they compute.

    `run(batch)` is `launch(batch)` and `collect()`.
    """

    # How many of the likeliest tokens' log probabilities it gives at most; None: it does not sample.
    max_top_logprobs: int | None
    # How many tokens the distributions of a step's `DrawnDrafts` may name at most, all together; 0: it verifies none.
    max_draft_entries: int

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        """Begin a step, as `run` says, and return before it is done. `collect` comes before anything else.

        `sampling` (for `batch.logits_rows`): sample, where the executor does.
        """
        ...

    def collect(self) -> tuple[NDArray[np.float32], SampledRows | None]:
        """Wait for the step: its logits f32 [R, vocab_size], and what was sampled where that was asked for.

        Of rows that were sampled the logits are undefined. A row has no token where it was not to be sampled, where its
        logits are not finite, and where top_k, top_p or min_p leave more than `MAX_CANDIDATES`
        (`runtime/sampling/narrow.py`) tokens, among which the host chooses in another order.
        """
        ...
