"""Proposers for tests: drafts that are partly right by knowing the answer, and drafts from a known distribution."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from tiny_model import HashModelExecutor

from runtime.executor import StepBatch
from runtime.sampler import Sampler
from runtime.sequence import Sequence
from runtime.speculation.config import SpeculationConfig
from runtime.speculation.draft_engine import DraftEngine
from runtime.speculation.head_engine import HeadEngine
from runtime.speculation.proposer import Draft
from runtime.speculation.vocabulary import DraftVocabulary

# What makes a core take the proposer that it is given, at full length.
ANY_DRAFTS = SpeculationConfig(
    method=("draft_model",), model="in this process", adaptive=False, num_speculative_tokens=5
)


class PartlyRight:
    """Drafts the true answer with some tokens swapped for others, at random lengths."""

    name = "draft_model"
    is_free = True

    def __init__(self, answer: Callable[[Sequence], list[int]], vocab_size: int, *, seed: int = 0, right: float = 0.8):
        self._answer = answer  # all output tokens of a sequence
        self._vocab_size = vocab_size
        self._random = Random(seed)
        self._right = right
        self.released: list[Sequence] = []

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        return [self._draft(sequence, most) for sequence, most in wanted]

    def _draft(self, sequence: Sequence, most: int) -> Draft | None:
        random = self._random
        truth = self._answer(sequence)[sequence.num_output_tokens :]
        tokens = [
            truth[i] if i < len(truth) and random.random() < self._right else random.randrange(self._vocab_size)
            for i in range(random.randint(0, most))
        ]
        return Draft(tokens, source=self.name) if tokens else None

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        self.released.append(sequence)


class PartlyRightModel(HashModelExecutor):
    """The hash model, but for a share of the histories, after which it says something else."""

    def __init__(self, *, right: float, **options: Any):
        super().__init__(**options)
        self._right = right

    def logits_after(self, history: Any) -> np.ndarray:
        logits = super().logits_after(history)
        return logits if logits[0] < 8 * self._right else logits[::-1].copy()


_WIDTH = 300  # of a hidden state: flag, length, tokens


def _as_hidden(histories: list[Any], own: bool) -> np.ndarray:
    states = np.full((len(histories), _WIDTH), -1, np.float32)
    for state, history in zip(states, histories, strict=True):
        state[:2] = own, len(history)
        state[2 : 2 + len(history)] = history
    return states


class HashTarget(HashModelExecutor):
    """The hash model as a head's target: a hidden state spells out the history that it was computed from."""

    hidden_states: np.ndarray

    def output_of(self, batch: StepBatch, histories: list[Any]) -> np.ndarray:
        self.hidden_states = _as_hidden(histories, own=False)
        return super().output_of(batch, histories)


class HashHead(PartlyRightModel):
    """The hash model as a head: it knows the history by the hidden state and the token of its slot.

    A slot whose hidden state and token do not belong together, one that is not where it should be in the cache, and one
    of the target's that follows a slot of the head's own, is an AssertionError.
    """

    hidden_states: np.ndarray

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.own = np.zeros((num_blocks, self.kv_layout.block_size), bool)

    def output_of(self, batch: StepBatch, histories: list[Any]) -> np.ndarray:
        assert batch.hidden_states is not None
        size, full = self.kv_layout.block_size, []
        for b, past in enumerate(batch.past_lens.tolist()):
            start, end = int(batch.query_starts[b]), int(batch.query_starts[b + 1])
            table = batch.block_ids[batch.block_starts[b] : batch.block_starts[b + 1]]
            for row in range(start, end):
                state, slot = batch.hidden_states[row], past + row - start
                is_own = bool(state[0])
                if not is_own:
                    before = np.arange(slot)
                    assert not self.own[table[before // size], before % size].any(), "a slot was not fed again"
                self.own[table[slot // size], slot % size] = is_own
                full.append(np.append(state[2 : 2 + int(state[1])].astype(np.int64), batch.token_ids[row]))
        known = [full[row] for row in batch.logits_rows.tolist()]
        for history, whole in zip(histories, known, strict=True):
            assert history.tolist() == whole[-len(history) :].tolist(), "the slots are not those of the text"
        self.hidden_states = _as_hidden(known, own=True)
        return super().output_of(batch, known)


def hash_head_engine(
    *, num_blocks: int = 200, block_size: int = 4, right: float = 1.0, drawn: bool = False, **options: Any
) -> HeadEngine:
    """A head that agrees with the hash model after a share `right` of the histories. Its target: `HashTarget`."""
    executor = HashHead(right=right, num_blocks=num_blocks, block_size=block_size)
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "max_context_len": 256} | options
    everything = DraftVocabulary.of(list(range(executor.vocab_size)), 0, executor.vocab_size)
    sampler = Sampler(executor.vocab_size, ())
    return HeadEngine(executor, sampler, drawn=drawn, vocabulary=everything, **limits)


def hash_draft_engine(
    *, num_blocks: int = 200, block_size: int = 4, right: float = 1.0, drawn: bool = False, **options: Any
) -> DraftEngine:
    """A draft engine that agrees with the hash model after a share `right` of the histories."""
    executor = PartlyRightModel(right=right, num_blocks=num_blocks, block_size=block_size)
    sampler = Sampler(executor.vocab_size, ())
    limits = {"max_num_batched_tokens": 16, "max_context_len": 256} | options
    return DraftEngine(executor, sampler, drawn=drawn, **limits)


class DrawnFromTable:
    """Draws each token from `table` f64 [V, V]: row t holds the distribution of what follows token t."""

    name = "draft_model"
    is_free = True

    def __init__(self, table: np.ndarray, *, seed: int = 0):
        self._table = table
        self._rng = np.random.default_rng(seed)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        return [self._draft(sequence.tokens[-1], most) for sequence, most in wanted]

    def _draft(self, last: int, most: int) -> Draft:
        tokens, distributions = [], []
        for _ in range(most):
            q = self._table[last]
            ids = np.flatnonzero(q > 0)
            last = int(self._rng.choice(ids, p=q[ids]))
            tokens.append(last)
            distributions.append((ids, q[ids]))
        return Draft(tokens, distributions, source=self.name)

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        pass
