"""Drafts with an EAGLE-style head (Li et al. 2024), whose engine is part of the target's artifact.

A slot of the head's cache holds the target's hidden state at a position and the token that was read off it; slots of a
draft hold the head's own outputs instead, and are overwritten by the target's as tokens are accepted. So a mirror is
good as far as its slots were fed by the target, whatever its tokens are.

The target gives hidden states of the rows whose logits it computes: the prompt's last token and every token after it.
A mirror therefore begins at the prompt's end. Chunked prefill, prefix-cache hits and recomputation after a preemption
have nothing to feed; and where feed was dropped, since nobody drafted for long, a mirror begins anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.speculation.draft_engine import DraftEngine

if TYPE_CHECKING:
    from runtime.executor import Executor, StepBatch
    from runtime.sampler import Sampler
    from runtime.sequence import Sequence
    from runtime.speculation.draft_engine import Logits, _Job
    from runtime.speculation.vocabulary import DraftVocabulary

States = NDArray[np.float32]
# Slots that wait to be fed, of a sequence and of all of them: while nobody drafts, older ones are dropped, so that to
# begin anew takes a pass of few rows. SmolLM2-135M's head with 16 slots drafts nearly as well as with all.
_MOST_WAITING, _MOST_OF_ALL, _LEAST_CONTEXT = 64, 256, 16


@dataclass(slots=True)
class _Feed:
    """The target's hidden states of one sequence.

    `start`: the position of the mirror's first slot. `fed`: its slots that the target's states were fed to. `waiting`
    [k, H] of the slots that follow. `last` [1, H]: of the last fed slot, should that be wanted again.
    """

    start: int
    fed: int = 0
    waiting: list[States] = field(default_factory=list)
    num_waiting: int = 0
    last: States | None = None


class HeadEngine(DraftEngine):
    """Drafts with a head's `executor`, whose cache is allocated; arguments as of `DraftEngine`."""

    name = "eagle"

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        max_context_len: int,
        vocabulary: DraftVocabulary,
        drawn: bool = False,
    ):
        super().__init__(
            executor,
            sampler,
            max_num_batched_tokens=max_num_batched_tokens,
            max_context_len=max_context_len,
            drawn=drawn,
            vocabulary=vocabulary,
            enable_prefix_caching=False,  # slots depend on more than their tokens
        )
        self._feeds: dict[Sequence, _Feed] = {}
        self._outputs: dict[Sequence, States] = {}  # of the last pass, by mirror
        self._one_sequence = getattr(executor, "one_sequence", None)

    def take_hidden(self, hidden: States, sequences: Listed[Sequence], rows: Listed[int], counts: Listed[int]) -> None:
        """See `HiddenReader`."""
        feeds = self._feeds
        most = min(_MOST_WAITING, max(_LEAST_CONTEXT, _MOST_OF_ALL // max(1, len(feeds))))
        for sequence, row, count in zip(sequences, rows, counts, strict=True):
            feed = feeds.get(sequence)
            position = len(sequence.tokens) - 1  # of the first of them
            if feed is None or feed.start + feed.fed + feed.num_waiting != position:
                feed = self._restart(sequence, position)
            feed.waiting.append(hidden[row : row + count])
            feed.num_waiting += count
            if feed.num_waiting > most:
                if feed.fed:
                    states, count = feed.waiting, feed.num_waiting
                    feed = self._restart(sequence, feed.start + feed.fed)
                    feed.waiting, feed.num_waiting = states, count
                while feed.num_waiting > most and len(feed.waiting) > 1:
                    dropped = len(feed.waiting.pop(0))
                    feed.start += dropped
                    feed.num_waiting -= dropped

    def num_behind(self, sequence: Sequence) -> int:
        feed = self._feeds.get(sequence)
        return feed.num_waiting if feed is not None else 0

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        self._feeds.pop(sequence, None)
        super().release(sequence, complete=complete)

    def _restart(self, sequence: Sequence, position: int) -> _Feed:
        """Begin a sequence's mirror anew, its first slot at `position`."""
        super().release(sequence, complete=False)
        feed = self._feeds[sequence] = _Feed(position)
        return feed

    def _synced(self, sequence: Sequence, keep: set[Sequence]) -> Sequence | None:
        feed = self._feeds.get(sequence)
        if feed is None:
            return None
        if not feed.num_waiting:  # drafted for, and then not run: its last slot's logits are wanted again
            if feed.last is None:
                return None
            feed.waiting, feed.num_waiting, feed.last = [feed.last], 1, None
            feed.fed -= 1
        tokens = sequence.tokens[feed.start + 1 :]
        if feed.fed + feed.num_waiting != len(tokens):  # something else changed the sequence: not a case that is known
            self.release(sequence, complete=False)
            return None
        mirror = self._mirrors.get(sequence)
        if mirror is None or not feed.fed:
            if feed.fed:
                return None
            super().release(sequence, complete=False)
            return self._new_mirror(sequence, keep)
        self._mirrors.move_to_end(sequence)
        self.kv.truncate(mirror, feed.fed)
        mirror.tokens.extend(tokens[feed.fed :])
        return mirror

    def _tokens_of(self, sequence: Sequence) -> array[int]:
        return sequence.tokens[self._feeds[sequence].start + 1 :]

    def _logits(self, parts: list[tuple[_Job, int]]) -> Listed[Logits]:
        (job, count), mirror = parts[0], parts[0][0].mirror
        if len(parts) > 1 or self._one_sequence is None or self._copies or count < mirror.num_uncomputed:
            return super()._logits(parts)
        start, size = mirror.num_computed, self.kv.block_size
        blocks = -(-(start + count) // size)
        one = self._one_sequence(count, blocks)
        if one is None:
            return super()._logits(parts)
        one.run(mirror.tokens[start : start + count], start, mirror.block_ids[:blocks], self._states(job, count))
        self._outputs = {job.target: one.hidden_states}
        return [one.logits]

    def _run(self, batch: StepBatch, parts: list[tuple[_Job, int]]) -> Listed[Logits]:
        states = [self._states(job, count) for job, count in parts]
        batch.hidden_states = np.concatenate(states) if len(states) > 1 else states[0]
        logits = self.executor.run(batch)
        outputs = self.executor.hidden_states.copy()  # type: ignore[attr-defined]
        ready = [job for job, count in parts if job.mirror.num_uncomputed == count]
        self._outputs = {job.target: outputs[row : row + 1] for row, job in enumerate(ready)}
        return logits  # type: ignore[return-value]

    def _states(self, job: _Job, count: int) -> States:
        """What the next `count` slots of a mirror are fed [count, H]."""
        if job.token_ids:  # under way: the head's own output
            return self._outputs[job.target]
        feed = self._feeds[job.target]
        whole = np.concatenate(feed.waiting) if len(feed.waiting) > 1 else feed.waiting[0]
        feed.fed += count
        feed.num_waiting -= count
        feed.waiting = [whole[count:]] if feed.num_waiting else []
        feed.last = whole[count - 1 : count]
        return whole[:count]
