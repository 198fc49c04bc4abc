"""What a step brought in: logits become tokens, tokens become deltas, and whoever is done is ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.beam_steps import advance_beams, beam_result
from runtime.errors import GenerationError
from runtime.executor import SampledRows
from runtime.logprobs import prompt_logprobs
from runtime.messages import EngineStats, RequestDelta, SequenceDelta
from runtime.sampler import NOTHING_ALLOWED, SampledToken, Sampler
from runtime.scheduler import Scheduler
from runtime.scheduling.step import ScheduledSequence, ScheduledStep
from runtime.scheduling.waiting_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from runtime.sequence import Request, Sequence
from runtime.speculation.verification import sample_and_verify

if TYPE_CHECKING:
    from runtime.speculation.speculator import Speculator

Logits = NDArray[np.float32]


class Harvester:
    """Turns each step's logits, or hidden states where the engine embeds, into the deltas of its requests.

    `on_end(request, error, kind)` is told of each request that is over (error None: as it should be; `kind` as
    `RequestDelta.error_kind`), after its sequences were ended. `speculator` is told of each verified draft.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sampler: Sampler,
        stats: EngineStats,
        clock: Callable[[], float],
        on_end: Callable[[Request, str | None, str], None],
        speculator: Speculator | None = None,
    ):
        self.scheduler = scheduler
        self.kv = scheduler.kv
        self.sampler = sampler
        self.stats = stats
        self.clock = clock
        self.on_end = on_end
        self.speculator = speculator
        self.charge_users = False  # somebody has named a user: count who gets what

    def harvest(
        self,
        step: ScheduledStep,
        logits: Logits,
        hidden: Logits | None = None,
        sampled: SampledRows | None = None,
    ) -> list[RequestDelta]:
        """Note what was computed, sample (or pool) every sequence that is up to date, and tell.

        `hidden` f32 [R, H]: what the logits were read off, where the engine gives that. `sampled`: what the device has
        sampled of the rows by `plan_sampling`.
        """
        advance = self.kv.advance
        targets: list[Sequence] = []
        rows: list[int] = []  # each target's first row of logits: that of its last token
        beams: dict[Request, list[int]] = {}
        deltas: list[RequestDelta] = []
        row = -1
        for part in step.sequences:
            sequence = part.sequence
            request = sequence.request
            # Another of its sequences has failed, or it was aborted while the step ran.
            if request.finished or sequence.finish_reason is not None:
                row += part.num_rows
                continue
            # Drafted tokens are computed, too, but count only once they are accepted.
            num_tokens = min(part.num_tokens, len(sequence.tokens) - sequence.num_computed)
            del sequence.draft_token_ids[part.num_tokens - num_tokens :]
            advance(sequence, num_tokens)
            if self.charge_users and num_tokens > 1:
                self.scheduler.waiting.charge(request.user, PROMPT_TOKEN_COST * num_tokens)
            if not part.num_rows:
                continue
            row += part.num_rows
            if request.pooler is not None:
                request.pooler.take(sequence.num_computed - part.num_rows, logits[row + 1 - part.num_rows : row + 1])
                if sequence.num_computed == len(sequence.tokens):
                    self._take_embedding(request, deltas)
                continue
            if request.wants_prompt_logprobs:
                try:
                    take_prompt_logprobs(part, logits[row + 1 - part.num_rows : row + 1])
                except GenerationError as error:
                    self._fail(request, str(error), "generation")
                    continue
            if sequence.num_computed < len(sequence.tokens):
                continue
            if request.beam is not None:
                beams.setdefault(request, []).append(row)
                continue
            targets.append(sequence)
            rows.append(row - len(sequence.draft_token_ids))
            if not request.forked:
                children = self._fork(request)
                targets += children
                rows += [row] * len(children)
        for request, beam_rows in beams.items():
            try:
                self._step_beams(request, logits[beam_rows], deltas)
            except GenerationError as error:
                self._fail(request, str(error), "generation")
        if targets:
            tokens = sample_and_verify(self.sampler, logits, targets, rows, sampled)
            if hidden is not None and self.speculator is not None:
                self.speculator.take_hidden(hidden, targets, rows, [len(new) for new in tokens])
            self._take_tokens(targets, tokens, deltas)
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

    def _take_tokens(
        self, sequences: list[Sequence], sampled: list[list[SampledToken]], deltas: list[RequestDelta]
    ) -> None:
        """Append each sequence's new tokens, end those that are over, and add the deltas."""
        now = self.clock()
        charge = self.scheduler.waiting.charge if self.charge_users else None
        grouped: dict[Request, list[SequenceDelta]] = {}  # of requests with several sequences
        for sequence, tokens in zip(sequences, sampled, strict=True):
            request = sequence.request
            if request.finished:  # the sampling of a sibling failed
                continue
            if (error := tokens[-1].error) is not None:
                self._fail(request, error, tokens[-1].error_kind)
                continue
            self.stats.generation_tokens += len(tokens)
            last = tokens[-1].token_id
            sequence.tokens.extend([token.token_id for token in tokens])
            if sequence.draft_token_ids:
                self._settle_draft(sequence, tokens)
            if request.first_token_time is None:
                self._first_token(request, now)
            request.last_token_time = now
            if charge is not None:
                charge(request.user, OUTPUT_TOKEN_COST * len(tokens))
            delta = SequenceDelta(sequence.index, [token.token_id for token in tokens])
            if tokens[-1].logprob is not None:
                delta.cumulative_logprob = sequence.sampling.cumulative_logprob
                if tokens[-1].logprobs is not None:
                    delta.logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
            if last in request.end_token_ids or len(sequence.tokens) >= request.max_total_tokens:
                note_finish(sequence, last)
                delta.finish_reason, delta.stop_reason = sequence.finish_reason, sequence.stop_reason
                self.scheduler.finish_sequence(sequence)
            if request.width > 1:
                grouped.setdefault(request, []).append(delta)
            else:
                deltas.append(request_delta(request, [delta]))
                if not request.live:
                    self.on_end(request, None, "")
        for request, parts in grouped.items():
            if not request.finished:
                deltas.append(request_delta(request, parts))
                if not request.live:
                    self.on_end(request, None, "")

    def _settle_draft(self, sequence: Sequence, tokens: list[SampledToken]) -> None:
        """The accepted tokens are in the cache already; the cells of the others are written again."""
        draft, request = sequence.draft_token_ids, sequence.request
        accepted = 0
        while accepted < min(len(draft), len(tokens)) and tokens[accepted].token_id == draft[accepted]:
            accepted += 1
        self.kv.advance(sequence, len(tokens) - 1)
        self.kv.trim(sequence)
        request.num_drafts += 1
        request.num_draft_tokens += len(draft)
        request.num_accepted_tokens += accepted
        if self.speculator is not None:
            self.speculator.verified(sequence, len(draft), accepted)
        sequence.draft_token_ids, sequence.draft_distributions = [], None

    def _take_embedding(self, request: Request, deltas: list[RequestDelta]) -> None:
        """The prompt is computed, which is all that an embedding needs."""
        assert request.pooler is not None
        vector = request.pooler.result()
        if not np.isfinite(vector).all():
            self._fail(request, "the hidden states of this prompt are not finite: the engine is at fault", "generation")
            return
        now = self.clock()
        self._first_token(request, now)
        request.last_token_time = now
        (sequence,) = request.live
        sequence.finish_reason = "stop"
        self.scheduler.finish_sequence(sequence)
        delta = request_delta(request, [SequenceDelta(sequence.index, [], finish_reason="stop")])
        delta.embedding = vector.tobytes()
        deltas.append(delta)
        self.on_end(request, None, "")

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
            if not results:
                self._fail(request, NOTHING_ALLOWED, "request")
                return
            self.scheduler.remove(request)
            deltas.append(request_delta(request, results))
            self.on_end(request, None, "")

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        if not request.resumed:
            self.stats.prompt_tokens += request.num_prompt_tokens

    def _fail(self, request: Request, error: str, kind: str) -> None:
        """End one request with an error; the others go on."""
        self.scheduler.remove(request)
        self.on_end(request, error, kind)


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
    if request.num_drafts:
        delta.drafted = (request.num_drafts, request.num_draft_tokens, request.num_accepted_tokens)
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
