"""Beam search: which beams go on, which hypotheses are kept, when to stop. Pure selection; the core moves the blocks.

The rules are transformers' (`GenerationMixin._beam_search`): (1 + number of EOS ids, at least 2) x `beam_width`
candidates a step, of which only the best `beam_width` may end as hypotheses, ranked by sum(log p) /
length^length_penalty, the length counting generated tokens. Scores are float32, as theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.errors import GenerationError
from runtime.logits_processors import LogitsProcessor
from runtime.logprobs import not_finite
from runtime.sampling.rows import ChunkedExp, top_ids


@dataclass(slots=True)
class BeamMove:
    """A beam of the next step: the row of `logits` (live beam) that it continues, its new token, its sum of log p."""

    parent: int
    token_id: int
    cum_logprob: float


@dataclass(slots=True)
class Hypothesis:
    """A finished sequence: its tokens (EOS included), its length-penalised score, and stop | length."""

    token_ids: list[int]
    score: float
    finish_reason: str


@dataclass(slots=True)
class _Beam:
    token_ids: list[int]
    score: np.float32
    processors: list[LogitsProcessor] = field(default_factory=list)


class BeamSearch:
    """The search of one request. Begin with one live beam, the prompt; `step` until `is_done`."""

    def __init__(
        self,
        beam_width: int,
        n: int,
        eos_token_ids: Iterable[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        prompt_len: int = 0,
        processors: Sequence[LogitsProcessor] = (),
    ):
        """`eos_token_ids`: all ids that end a hypothesis. `processors` see log probabilities, as in transformers."""
        self._width = beam_width
        self._n = n
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_candidates = max(2, 1 + len(self._eos)) * beam_width
        self._beams = [_Beam([], np.float32(0.0), list(processors))]
        self._finished: list[Hypothesis] = []  # the best `beam_width`, best first
        self._exp: ChunkedExp | None = None
        self.is_done = False

    def step(self, logits: NDArray[np.float32]) -> list[BeamMove]:
        """Take the logits f32 [live beams, V], in the beams' order. Returns the next step's beams, best first.

        Once `is_done`, the moves no longer matter. Raises `GenerationError` where the logits are not finite.
        """
        candidates = self._candidates(logits)
        length = len(self._beams[0].token_ids) + 1
        at_limit = length >= self._max_tokens
        ends = [at_limit or token_id in self._eos for _, _, token_id in candidates]
        self._keep_finished(candidates[: self._width], ends, length)
        moves = [
            BeamMove(parent, token_id, float(score))
            for (score, parent, token_id), over in zip(candidates, ends, strict=True)
            if not over
        ][: self._width]
        self._advance(moves)
        self.is_done = not moves or not self._can_improve(moves[0].cum_logprob, length)
        return moves

    def hypotheses(self) -> list[Hypothesis]:
        """The n best, best first: fewer where there are no more. Where none has ended, the live beams."""
        if self._finished:
            return self._finished[: self._n]
        return [
            Hypothesis(beam.token_ids.copy(), float(beam.score) / len(beam.token_ids) ** self._length_penalty, "length")
            for beam in self._beams[: self._n]
            if beam.token_ids
        ]

    def _candidates(self, logits: NDArray[np.float32]) -> list[tuple[np.float32, int, int]]:
        """The best (score, parent, token) of all beams, best first."""
        if self._exp is None:
            self._exp = ChunkedExp(logits.shape[1])
        found: list[tuple[np.float32, int, int]] = []
        for parent, (row, beam) in enumerate(zip(logits, self._beams, strict=True)):
            log_sum = self._exp.log_sum(row)
            if math.isnan(log_sum):
                raise GenerationError(not_finite(float(row.max())))
            log_probs = row - np.float32(log_sum)
            for processor in beam.processors:
                processor.apply(log_probs)
            ids = top_ids(log_probs, self._num_candidates, self._exp)
            scores = log_probs[ids] + beam.score
            found += [(s, parent, t) for s, t in zip(scores, ids.tolist(), strict=True) if s > -np.inf]
        found.sort(key=lambda candidate: -candidate[0])
        return found[: self._num_candidates]

    def _keep_finished(self, candidates: list[tuple[np.float32, int, int]], ends: list[bool], length: int) -> None:
        if self._early_stopping and len(self._finished) == self._width:
            return
        for (score, parent, token_id), over in zip(candidates, ends, strict=False):
            if over:
                tokens = [*self._beams[parent].token_ids, token_id]
                reason = "stop" if token_id in self._eos else "length"
                self._finished.append(Hypothesis(tokens, float(score / length**self._length_penalty), reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._width :]

    def _advance(self, moves: list[BeamMove]) -> None:
        beams = []
        for move in moves:
            parent = self._beams[move.parent]
            processors = [processor.fork() for processor in parent.processors]
            for processor in processors:
                processor.append(move.token_id)
            beams.append(_Beam([*parent.token_ids, move.token_id], np.float32(move.cum_logprob), processors))
        if beams:
            self._beams = beams

    def _can_improve(self, best_running: float, length: int) -> bool:
        """Whether going on may still change the result (for early_stopping False a heuristic, as in transformers)."""
        if len(self._finished) < self._width:
            return True
        if self._early_stopping:
            return False
        return best_running / length**self._length_penalty > self._finished[-1].score
