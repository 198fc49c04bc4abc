"""What a step brought in: logits become tokens, tokens become deltas, and whoever is done is ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.beam_steps import advance_beams, beam_result
from runtime.logprobs import prompt_logprobs
from runtime.messages import EngineStats, RequestDelta, SequenceDelta
from runtime.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from runtime.scheduling.waiting_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from runtime.sequence import Request, Sequence

if TYPE_CHECKING:
    from runtime.sampler import SampledToken, Sampler

Logits = NDArray[np.float32]


class Harvester:
    """Turns each step's logits into the deltas of its requests.

    `on_end(request, error)` is told of each request that is over (error None: as it should be), after its sequences
    were ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sampler: Sampler,
        stats: EngineStats,
        clock: Callable[[], float],
        on_end: Callable[[Request, str | None], None],
    ):
        self.scheduler = scheduler
        self.kv = scheduler.kv
        self.sampler = sampler
        self.stats = stats
        self.clock = clock
        self.on_end = on_end
        self.charge_users = False  # somebody has named a user: count who gets what

    def harvest(self, step: ScheduledStep, logits: Logits) -> list[RequestDelta]:
        """Note what was computed, sample every sequence that is up to date, and tell."""
        advance = self.kv.advance
        targets: list[Sequence] = []
        rows: list[int] = []  # each target's row of logits
        beams: dict[Request, list[int]] = {}
        row = -1
        for part in step.sequences:
            sequence = part.sequence
            request = sequence.request
            advance(sequence, part.num_tokens)
            if self.charge_users and part.num_tokens > 1:
                self.scheduler.waiting.charge(request.user, PROMPT_TOKEN_COST * part.num_tokens)
            if not part.num_rows:
                continue
            row += part.num_rows
            if request.wants_prompt_logprobs:
                take_prompt_logprobs(part, logits[row + 1 - part.num_rows : row + 1])
            if sequence.num_computed < len(sequence.tokens):
                continue
            if request.beam is not None:
                beams.setdefault(request, []).append(row)
                continue
            targets.append(sequence)
            rows.append(row)
            if not request.forked:
                children = self._fork(request)
                targets += children
                rows += [row] * len(children)
        deltas: list[RequestDelta] = []
        for request, beam_rows in beams.items():
            self._step_beams(request, logits[beam_rows], deltas)
        if targets:
            chosen = logits if rows == list(range(len(logits))) else logits[rows]
            self._take_tokens(targets, self.sampler.sample(chosen, [target.sampling for target in targets]), deltas)
        return deltas

    def _fork(self, request: Request) -> list[Sequence]:
        """The prompt is computed: start the other sequences on the same blocks."""
        first = request.live[0]
        request.forked = True
        for index in range(1, request.width):
            child = Sequence(request, index, first.tokens[:])
            child.sampling = self.sampler.new_state(request.params, request.message.prompt_token_ids, index)
            self.kv.fork(first, child)
            request.sequences.append(child)
            request.live.append(child)
        return request.live[1:]

    def _take_tokens(self, sequences: list[Sequence], sampled: list[SampledToken], deltas: list[RequestDelta]) -> None:
        """Append each sequence's new token, end those that are over, and add the deltas."""
        now = self.clock()
        self.stats.generation_tokens += len(sequences)
        charge = self.scheduler.waiting.charge if self.charge_users else None
        grouped: dict[Request, list[SequenceDelta]] = {}  # of requests with several sequences
        for sequence, token in zip(sequences, sampled, strict=True):
            request = sequence.request
            if request.finished:  # the sampling of a sibling failed
                continue
            if token.error is not None:
                self._fail(request, token.error)
                continue
            token_id, logprob = token.token_id, token.logprob
            sequence.tokens.append(token_id)
            state = sequence.sampling
            state.append(token_id, logprob)
            if request.first_token_time is None:
                self._first_token(request, now)
            request.last_token_time = now
            if charge is not None:
                charge(request.user, OUTPUT_TOKEN_COST)
            delta = SequenceDelta(sequence.index, [token_id])
            if logprob is not None:
                delta.cumulative_logprob = state.cumulative_logprob
                if token.logprobs is not None:
                    delta.logprobs = [token.logprobs]
            if token_id in request.end_token_ids or len(sequence.tokens) >= request.max_total_tokens:
                note_finish(sequence, token_id)
                delta.finish_reason, delta.stop_reason = sequence.finish_reason, sequence.stop_reason
                self.scheduler.finish_sequence(sequence)
            if request.width > 1:
                grouped.setdefault(request, []).append(delta)
            else:
                deltas.append(request_delta(request, [delta]))
                if not request.live:
                    self.on_end(request, None)
        for request, parts in grouped.items():
            if not request.finished:
                deltas.append(request_delta(request, parts))
                if not request.live:
                    self.on_end(request, None)

    def _step_beams(self, request: Request, logits: Logits, deltas: list[RequestDelta]) -> None:
        now = self.clock()
        if request.first_token_time is None:
            self._first_token(request, now)
        request.last_token_time = now
        num_tokens = advance_beams(request, logits, self.kv)
        self.stats.generation_tokens += num_tokens
        if self.charge_users:
            self.scheduler.waiting.charge(request.user, OUTPUT_TOKEN_COST * num_tokens)
        if request.beam.is_done:
            results = beam_result(request)
            self.scheduler.remove(request)
            deltas.append(request_delta(request, results))
            self.on_end(request, None)

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        if not request.resumed:
            self.stats.prompt_tokens += request.num_prompt_tokens

    def _fail(self, request: Request, error: str) -> None:
        """End one request with an error; the others go on."""
        self.scheduler.remove(request)
        self.on_end(request, error)


def note_finish(sequence: Sequence, token_id: int) -> bool:
    """Note on the sequence why it is over after this token. False where it is not."""
    request = sequence.request
    if token_id in request.eos_token_ids:
        sequence.finish_reason = "stop"
    elif token_id in request.stop_token_ids:
        sequence.finish_reason, sequence.stop_reason = "stop", token_id
    elif len(sequence.tokens) >= request.max_total_tokens:
        sequence.finish_reason = "length"
    return sequence.finish_reason is not None


def request_delta(request: Request, sequences: list[SequenceDelta]) -> RequestDelta:
    """What a step brought for one request."""
    delta = RequestDelta(
        request_id=request.request_id,
        sequences=sequences,
        finished=not request.live,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        first_scheduled_time=request.first_scheduled_time,
    )
    if request.wants_prompt_logprobs:
        delta.prompt_logprobs = request.prompt_logprobs
        request.wants_prompt_logprobs = False
    return delta


def take_prompt_logprobs(part: ScheduledSequence, logits: Logits) -> None:
    """Score the prompt tokens that follow the part's rows of logits f32 [num_rows, V]."""
    sequence, request = part.sequence, part.sequence.request
    after_first = sequence.num_computed - part.num_rows + 1  # position that the first row predicts
    start = max(len(request.prompt_logprobs), after_first)
    following = sequence.tokens[start : min(request.num_prompt_tokens, sequence.num_computed + 1)]
    if following:
        rows = logits[start - after_first : start - after_first + len(following)]
        num_top = request.params.prompt_logprobs
        assert num_top is not None
        request.prompt_logprobs.extend(prompt_logprobs(rows, following.tolist(), num_top))
