"""The step after one that still runs, planned while it does, so that the device need not wait for the host.

Where every running sequence decodes and nobody can be admitted, the next step is the same sequences' next tokens unless
one of them ends. All but the tokens themselves is known before: positions, tables, the numbers of random draws. So it
is launched as soon as the tokens are there, and the host takes them in (deltas, text, prefix cache) beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from runtime.executor import RowSampling, StepBatch
from runtime.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from runtime.scheduler import Scheduler


def follow(step: ScheduledStep, scheduler: Scheduler) -> ScheduledStep | None:
    """What `Scheduler.schedule` will plan after `step`, which runs, should none of its sequences end; else None.

    The sequences get the blocks that this takes. They keep them if it does not come to that.
    """
    kv, running = scheduler.kv, scheduler.running
    if step.num_prefill_tokens or step.num_draft_tokens or scheduler.can_start():
        return None
    if len(step.sequences) != sum([len(request.live) for request in running]):
        return None
    refs, cached, size = kv.pool.ref_counts, kv.pool.cached, kv.block_size
    growing = []
    for part in step.sequences:
        sequence = part.sequence
        request, table = sequence.request, sequence.block_ids
        if sequence.finish_reason is not None or request.finished or request.protected or request.beam is not None:
            return None
        if len(sequence.tokens) + 1 >= request.max_total_tokens:
            return None
        index = (sequence.num_computed + 1) // size
        if index == len(table):
            growing.append(sequence)
        elif refs[table[index]] != 1 or cached[table[index]]:  # its copy could not wait until the step is sure
            return None
    # A block for each request is left, so that nobody is preempted for what may not be needed.
    if growing and kv.pool.num_free - kv.reserved - len(growing) < len(running):
        return None
    # Evicted blocks that are kept would have to be read off the device before.
    if kv.spill is not None and len(growing) > kv.pool.num_free - kv.pool.num_idle:
        return None
    copies: list[tuple[int, int]] = []
    for sequence in growing:
        kv.grow(sequence, 2, copies)
    assert not copies, "a block that the running step writes is shared"
    assert not kv.moves, "a block was evicted that is kept"
    following = ScheduledStep()
    following.sequences = step.sequences
    following.num_decode_tokens = step.num_decode_tokens
    return following


def following_batch(batch: StepBatch, step: ScheduledStep, block_size: int) -> StepBatch:
    """The inputs of the step that `follow` planned after `batch`, but for the token ids."""
    past_lens = batch.past_lens + np.int32(1)
    block_ids, block_starts = batch.block_ids, batch.block_starts
    crossing = np.flatnonzero(past_lens % block_size == 0)
    if crossing.size:
        blocks = [step.sequences[i].sequence.block_ids[past_lens[i] // block_size] for i in crossing.tolist()]
        block_ids = np.insert(block_ids, block_starts[crossing + 1], blocks)
        longer = np.zeros(len(block_starts), np.int32)
        longer[crossing + 1] = 1
        block_starts = block_starts + np.cumsum(longer, dtype=np.int32)
    return replace(
        batch, positions=batch.positions + 1, past_lens=past_lens, block_ids=block_ids, block_starts=block_starts,
        max_context_len=batch.max_context_len + 1, copies=[],
    )  # fmt: skip


def following_sampling(sampling: RowSampling) -> RowSampling:
    """How the rows of the following step are sampled."""
    return replace(sampling, positions=sampling.positions + np.int32(1))


@dataclass(slots=True)
class Flight:
    """A step that runs, or is about to: its inputs, and the times (s) when it was scheduled and its batch built."""

    step: ScheduledStep
    batch: StepBatch
    sampling: RowSampling | None
    scheduled: float
    built: float

    def successor(self, scheduler: Scheduler) -> Flight | None:
        """The flight after this one, which runs, if it will be what `follow` says; its token ids are missing."""
        if self.sampling is None or (self.sampling.temperatures < 0).any():  # the host samples
            return None
        step = follow(self.step, scheduler)
        if step is None:
            return None
        batch = following_batch(self.batch, step, scheduler.kv.block_size)
        return Flight(step, batch, following_sampling(self.sampling), self.scheduled, self.built)


def all_go_on(step: ScheduledStep, tokens: Sequence[int]) -> bool:
    """Whether none of the step's sequences ends with its token (negative: there is none)."""
    return all(
        token >= 0 and token not in part.sequence.request.end_token_ids
        for part, token in zip(step.sequences, tokens, strict=True)
    )
