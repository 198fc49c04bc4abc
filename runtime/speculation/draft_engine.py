"""A second, smaller engine that drafts (Leviathan et al. 2023; vLLM's `draft_model`), batched over the requests.

It has its own paged KV cache. For each sequence it keeps a mirror: the tokens whose keys and values are in that cache.
Before it drafts, a mirror is cut to what it has in common with the sequence and fed what it lacks; so accepted and
refused tokens, preemption, resumption and prefix-cache hits of the target all come to the same. A mirror is only a
help: where blocks are short, those unused for longest are dropped, and a sequence without one is not drafted for.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.batch import build_batch
from runtime.executor import Executor, StepBatch
from runtime.logits_processors import NEG_INF
from runtime.philox import DRAFT_STREAM, uniform
from runtime.sampler import Sampler, SamplingState
from runtime.sampling.rows import Likeliest, search_cdf
from runtime.scheduling.kv_manager import KvManager
from runtime.scheduling.step import ScheduledSequence, ScheduledStep
from runtime.sequence import Request, Sequence
from runtime.speculation.config import MAX_DRAFT
from runtime.speculation.proposer import Distribution, Draft, GoesOn
from runtime.speculation.vocabulary import DraftVocabulary

Logits = NDArray[np.float32]
# A greedy draft ends with the token where the draft's own confidence in all of it falls below this.
_LEAST_CONFIDENCE = 0.15


@dataclass(slots=True)
class _Job:
    """One sequence in a round of drafting."""

    target: Sequence
    mirror: Sequence
    most: int
    place: int  # in the answer
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # in each token, where none was drawn

    @property
    def state(self) -> SamplingState:
        return self.target.sampling


class DraftEngine:
    """Drafts with `executor`, whose cache is allocated. `sampler` is the target's.

    Args:
        max_num_batched_tokens: tokens of one pass.
        max_context_len: tokens of a sequence that the draft was built for; longer ones are not drafted for.
        drawn: tokens are drawn from the draft's distribution, under the request's own temperature, restrictions and
            processors; else the likeliest one is taken.
        vocabulary: where the draft knows only some of the target's tokens.
    """

    name = "draft_model"
    is_free = False

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        max_context_len: int,
        drawn: bool = False,
        vocabulary: DraftVocabulary | None = None,
        enable_prefix_caching: bool = True,
    ):
        self.executor = executor
        self.kv = KvManager(executor.num_blocks, executor.kv_layout.block_size, enable_prefix_caching)
        self._sampler = sampler
        self._most_tokens = max_num_batched_tokens
        self._max_context_len = max_context_len
        self._drawn = drawn
        self._vocabulary = vocabulary
        self._mirrors: OrderedDict[Sequence, Sequence] = OrderedDict()  # least recently used first
        self._row = np.full(sampler.vocab_size, NEG_INF, np.float32)
        self._likeliest = Likeliest()
        self._copies: list[tuple[int, int]] = []  # for the next pass
        self._goes_on: GoesOn = _sure_enough  # of the round under way

    def propose(self, wanted: Listed[tuple[Sequence, int]]) -> list[Draft | None]:
        return self.propose_while(wanted, _sure_enough)

    def propose_while(self, wanted: Listed[tuple[Sequence, int]], goes_on: GoesOn) -> list[Draft | None]:
        """See `ConfidentProposer`."""
        self._goes_on = goes_on
        jobs: list[_Job] = []
        for place, (sequence, most) in enumerate(wanted):
            most = min(most, self._max_context_len - len(sequence.tokens))
            mirror = self._synced(sequence, keep={job.target for job in jobs}) if most > 0 else None
            if mirror is not None:
                jobs.append(_Job(sequence, mirror, most, place))
        drafts: list[Draft | None] = [None] * len(wanted)
        going = self._catch_up(jobs)
        while going:
            for job in going:  # what the last pass chose is what the next one reads
                job.mirror.tokens.append(job.token_ids[-1])
            going = self._pass([(job, 1) for job in going if self._grow(job, 1)])
        for job in jobs:
            if job.token_ids:
                for processor in job.state.processors:
                    processor.rewind(job.token_ids)
                drawn = job.distributions if len(job.distributions) == len(job.token_ids) else None
                sure = job.confidences if len(job.confidences) == len(job.token_ids) else None
                drafts[job.place] = Draft(job.token_ids, drawn, source=self.name, confidences=sure)
        return drafts

    def num_behind(self, sequence: Sequence) -> int:
        mirror = self._mirrors.get(sequence)
        return len(sequence.tokens) - (mirror.num_computed if mirror is not None else 0)

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self.kv.release(mirror)

    # --- mirrors -----------------------------------------------------------------------------------------------

    def _synced(self, sequence: Sequence, keep: set[Sequence]) -> Sequence | None:
        """The sequence's mirror with exactly its tokens, computed as far as they were; None where no blocks are left
        even without the mirrors that are not in `keep`."""
        mirror = self._mirrors.get(sequence)
        if mirror is None:
            return self._new_mirror(sequence, keep)
        self._mirrors.move_to_end(sequence)
        # A sequence never takes a token back: they differ among the last ones drafted, if at all.
        same = min(mirror.num_computed, len(sequence.tokens))
        start = max(0, same - MAX_DRAFT)
        while start < same and mirror.tokens[start] == sequence.tokens[start]:
            start += 1
        # The last token is computed again where it was computed already: its logits are wanted.
        self.kv.truncate(mirror, max(1, min(start, len(sequence.tokens) - 1)))
        mirror.tokens = sequence.tokens[: len(mirror.tokens)]
        mirror.tokens.extend(sequence.tokens[len(mirror.tokens) :])
        return mirror

    def _new_mirror(self, sequence: Sequence, keep: set[Sequence]) -> Sequence | None:
        message = sequence.request.message
        request = Request(message, (0, 0), 1, sequence.request.max_total_tokens)
        request.root = None
        mirror = Sequence(request, 0, array("i", self._tokens_of(sequence)))
        request.live = [mirror]
        while not self.kv.acquire(request, 0):
            if not self._drop_one(keep):
                return None
        self._mirrors[sequence] = mirror
        return mirror

    def _tokens_of(self, sequence: Sequence) -> array[int]:
        """What its mirror holds."""
        return sequence.tokens

    def _drop_one(self, keep: set[Sequence]) -> bool:
        """Free the blocks of the mirror that was not used for longest."""
        for sequence in self._mirrors:
            if sequence not in keep:
                self.release(sequence, complete=False)
                return True
        return False

    def _grow(self, job: _Job, count: int) -> bool:
        """Room for the mirror's next tokens. False where there is none."""
        if self.kv.has_room(job.mirror, count):
            return True
        if self.kv.blocks_to_grow([job.mirror], [count]) > self.kv.pool.num_free:
            return False
        copies: list[tuple[int, int]] = []
        self.kv.grow(job.mirror, count, copies)
        self._copies += copies
        return True

    # --- passes ------------------------------------------------------------------------------------------------

    def _catch_up(self, jobs: list[_Job]) -> list[_Job]:
        """Feed the mirrors what they lack, as far as one pass holds it; choose the next token of the complete ones."""
        parts: list[tuple[_Job, int]] = []
        room = self._most_tokens
        for job in sorted(jobs, key=lambda job: job.mirror.num_uncomputed):
            count = min(room, job.mirror.num_uncomputed)
            if count > 0 and self._grow(job, count):
                parts.append((job, count))
                room -= count
        return self._pass(parts)

    def _pass(self, parts: list[tuple[_Job, int]]) -> list[_Job]:
        """Run tokens of the mirrors; choose the next token of those that are up to date. Returns who goes on."""
        if not parts:
            return []
        logits = self._logits(parts)
        for job, count in parts:
            self.kv.advance(job.mirror, count)
        ready = [job for job, _ in parts if not job.mirror.num_uncomputed]
        going = []
        for job, row in zip(ready, logits, strict=True):
            chosen = self._choose(job, row)
            if chosen and len(job.token_ids) < job.most and (not job.confidences or self._goes_on(job.confidences)):
                going.append(job)
        return going

    def _logits(self, parts: list[tuple[_Job, int]]) -> Listed[Logits]:
        """The logits of a pass over `parts`, of those that it brings up to date."""
        step = ScheduledStep()
        step.copies, self._copies = self._copies, []
        for job, count in parts:
            step.sequences.append(ScheduledSequence(job.mirror, count, int(count == job.mirror.num_uncomputed)))
        return self._run(build_batch(step, self.kv.block_size), parts)

    def _run(self, batch: StepBatch, parts: list[tuple[_Job, int]]) -> Listed[Logits]:
        if self._vocabulary is not None:
            batch.token_ids = self._vocabulary.to_draft[batch.token_ids]
        return self.executor.run(batch)  # type: ignore[return-value]

    def _choose(self, job: _Job, raw: Logits) -> bool:
        """Add the draft's next token. False where its logits offer none."""
        state = job.state
        drawn = self._drawn and not state.greedy
        row = self._processed(raw, state) if drawn or state.processors else raw
        if drawn:
            if not math.isfinite(float(row.max())):
                return False
            ids, p = self._sampler.distribution_of(row, state)
            u = uniform(state.seed, state.sequence_index, state.position + len(job.token_ids), DRAFT_STREAM)
            token_id = int(ids[search_cdf(np.cumsum(p), u)])
            job.distributions.append((ids, p))
        else:
            token_id, confidence = self._likeliest(row)
            if not math.isfinite(float(row[token_id])):
                return False
            if row is raw and self._vocabulary is not None:
                token_id = int(self._vocabulary.to_target[token_id])
            if token_id >= self._sampler.vocab_size:  # a place that pads the draft's logits
                return False
            job.confidences.append(confidence)
        job.token_ids.append(token_id)
        for processor in state.processors:
            processor.append(token_id)
        return True

    def _processed(self, raw: Logits, state: SamplingState) -> Logits:
        """The draft's logits over the target's vocabulary f32 [V], after the request's processors."""
        row = self._row
        if self._vocabulary is None:
            width = min(row.size, raw.size)
            row[:width] = raw[:width]
        else:
            row.fill(NEG_INF)
            row[self._vocabulary.to_target] = raw
        for processor in state.processors:
            processor.apply(row)
        return row

    def check(self) -> None:
        """Assert the invariants of the draft's blocks."""
        self.kv.pool.check(mirror.block_ids for mirror in self._mirrors.values())


def _sure_enough(confidences: Listed[float]) -> bool:
    return math.prod(confidences) >= _LEAST_CONFIDENCE
