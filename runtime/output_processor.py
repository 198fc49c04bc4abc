"""What the core says, made into what a caller reads: text, stop strings, log probabilities with text, the n best.

It lives on the client's side and alone knows what was delivered, so it can also write the request that resumes one
on a fresh core (`resume_request`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from runtime.detokenizer import IncrementalDetokenizer
from runtime.errors import (
    EngineDeadError,
    GenerationError,
    OverloadedError,
    PlancastError,
    QueueTimeoutError,
    RequestError,
)
from runtime.messages import AbortRequests, EngineRequest, RequestDelta, SequenceDelta, TokenLogprobs
from runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from runtime.stop_strings import StopStringFilter
from runtime.tokenizer import Tokenizer

_ERRORS = {
    "request": RequestError,
    "overloaded": OverloadedError,
    "queue_timeout": QueueTimeoutError,
    "generation": GenerationError,
    "engine": EngineDeadError,
}


@dataclass(slots=True)
class _Sequence:
    """One of a request's sequences: everything delivered, and the part (`new_*`) not handed out yet."""

    index: int
    detokenizer: IncrementalDetokenizer | None
    stops: StopStringFilter
    token_ids: list[int] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    new_text: list[str] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # tokens whose text nobody has asked for yet
    new_logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    cumulative_base: float = 0.0  # of the tokens before the last resume
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reported: bool = False  # its end was handed out

    @property
    def has_news(self) -> bool:
        return bool(self.new_token_ids or self.new_text) or (self.finish_reason is not None and not self.reported)

    def take(self, index: int | None = None) -> CompletionOutput:
        """Hand out what is new."""
        output = CompletionOutput(
            index=self.index if index is None else index,
            text="".join(self.new_text),
            token_ids=self.new_token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.new_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.new_token_ids, self.new_text = [], []
        self.new_logprobs = None if self.new_logprobs is None else []
        self.reported = self.finish_reason is not None
        return output


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    prompt: str | None
    stream: bool
    sequences: list[_Sequence]
    metrics: RequestMetrics
    new_prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_prompt_logprobs: int = 0  # positions received
    skip_prompt_logprobs: int = 0  # positions that a resumed core sends again
    embedding: bytes | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


class OutputProcessor:
    """Holds every request from `add_request` to its end. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add_request(self, request: EngineRequest, prompt: str | None = None, *, stream: bool = False) -> None:
        """Expect deltas for `request`. `stream`: outputs come step by step and hold what is new; else one, at the end.

        Raises `RequestError` for an id in use, and for a stream of `best_of`.
        """
        params = request.params
        if request.request_id in self._requests:
            raise RequestError(f"the request id {request.request_id!r} is in use", "request_id")
        if stream and params.num_sequences > params.n:
            raise RequestError(
                f"best_of = {params.best_of} with n = {params.n} cannot be streamed: which sequences are "
                "the best shows at the end",
                "best_of",
            )
        if self._tokenizer is None and params.stop_strings:
            raise RequestError("stop needs a tokenizer, and this engine has none", "stop")
        sequences = [self._new_sequence(request, index) for index in range(params.num_sequences)]
        metrics = RequestMetrics(arrival_time=request.arrival_time)
        state = _Request(request, prompt, stream, sequences, metrics)
        if params.prompt_logprobs is not None:
            state.new_prompt_logprobs = []
        self._requests[request.request_id] = state

    def _new_sequence(self, request: EngineRequest, index: int) -> _Sequence:
        params = request.params
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=request.prompt_token_ids,
            )
        stops = StopStringFilter(
            params.stop_strings, include_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )
        sequence = _Sequence(index, detokenizer, stops)
        if params.logprobs is not None:
            sequence.new_logprobs = []
        return sequence

    def process(self, deltas: Iterable[RequestDelta]) -> tuple[list[RequestOutput], AbortRequests | None]:
        """Outputs of one step, and the message for the core about what stop strings have ended (None: nothing).

        Deltas of requests that are over here already are dropped.
        """
        outputs: list[RequestOutput] = []
        aborts = AbortRequests(request_ids=[], sequences=[])
        now = time.monotonic()
        for delta in deltas:
            state = self._requests.get(delta.request_id)
            if state is None:
                continue
            if delta.error is not None:
                outputs.append(self._fail(state, delta))
                continue
            stopped = self._apply(state, delta, now)
            finished = delta.finished or state.finished
            if finished:
                state.metrics.finished_time = now
                del self._requests[delta.request_id]
                if not delta.finished:
                    aborts.request_ids.append(delta.request_id)
            else:
                aborts.sequences.extend((delta.request_id, index) for index in stopped)
            output = self._output(state, finished=finished)
            if output is not None:
                outputs.append(output)
        return outputs, aborts if aborts.request_ids or aborts.sequences else None

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests here (the core is told by the caller). Each gets a last output with finish reason "abort"."""
        outputs = []
        for request_id in request_ids:
            state = self._requests.pop(request_id, None)
            if state is None:
                continue
            state.metrics.finished_time = time.monotonic()
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    self._flush(sequence)
            output = self._output(state, finished=True)
            assert output is not None
            outputs.append(output)
        return outputs

    def fail(self, request_ids: Iterable[str], error: PlancastError) -> list[RequestOutput]:
        """End requests here with an error."""
        states = [self._requests.pop(request_id, None) for request_id in request_ids]
        return [self._error_output(state, error) for state in states if state is not None]

    def resume_request(self, request_id: str) -> EngineRequest:
        """The request that goes on where this one is, for a fresh core: the tokens delivered count as output."""
        state = self._requests[request_id]
        params = state.request.params
        if state.num_prompt_logprobs >= len(state.request.prompt_token_ids):
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        else:
            state.skip_prompt_logprobs = state.num_prompt_logprobs
        if params.beam_width > 0:  # beams deliver nothing before their end
            return msgspec.structs.replace(state.request, params=params)
        for sequence in state.sequences:
            sequence.cumulative_base = sequence.cumulative_logprob or 0.0
        return msgspec.structs.replace(
            state.request,
            params=params,
            resume_token_ids=[sequence.token_ids.copy() for sequence in state.sequences],
            resume_finished=[sequence.index for sequence in state.sequences if sequence.finish_reason is not None],
        )

    def remove_request(self, request_id: str) -> None:
        """Forget a request (also one that is not known): no output follows."""
        self._requests.pop(request_id, None)

    def _apply(self, state: _Request, delta: RequestDelta, now: float) -> list[int]:
        """Take one request's delta. Returns the indices of the sequences that a stop string has ended."""
        metrics = state.metrics
        metrics.num_cached_tokens = max(metrics.num_cached_tokens, delta.num_cached_tokens)
        metrics.num_preemptions = max(metrics.num_preemptions, delta.num_preemptions)
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = delta.first_scheduled_time
        if delta.embedding is not None:
            state.embedding = delta.embedding
        if delta.drafted is not None:
            metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens = delta.drafted
        if delta.prompt_logprobs:
            self._add_prompt_logprobs(state, delta.prompt_logprobs)
        stopped = []
        for new in delta.sequences:
            if new.replaces and new.index < len(state.sequences):
                state.sequences[new.index] = self._new_sequence(state.request, new.index)
            sequence = state.sequences[new.index]
            if sequence.finish_reason is not None:
                continue
            if metrics.first_token_time is None and new.new_token_ids:
                metrics.first_token_time = now
            if self._extend(state, sequence, new):
                stopped.append(new.index)
        return stopped

    def _extend(self, state: _Request, sequence: _Sequence, new: SequenceDelta) -> bool:
        """Add a delta to its sequence. True where a stop string ended it and the core does not know."""
        params = state.request.params
        if new.cumulative_logprob is not None:
            sequence.cumulative_logprob = sequence.cumulative_base + new.cumulative_logprob
        silent_last = new.finish_reason == "stop" and not params.include_stop_str_in_output
        if not state.stream and not params.stop_strings and params.logprobs is None:  # its text at once, at the end
            sequence.token_ids += new.new_token_ids
            sequence.new_token_ids += new.new_token_ids
            sequence.unread += new.new_token_ids[:-1] if silent_last else new.new_token_ids
            self._finish(sequence, new)
            return False
        last = len(new.new_token_ids) - 1
        for i, token_id in enumerate(new.new_token_ids):
            sequence.token_ids.append(token_id)
            sequence.new_token_ids.append(token_id)
            if new.logprobs is not None and sequence.new_logprobs is not None:
                sequence.new_logprobs.append(self._logprobs(new.logprobs[i], params.detokenize))
            if sequence.detokenizer is None:
                continue
            text = "" if silent_last and i == last else sequence.detokenizer.append(token_id)
            self._send(sequence, sequence.stops.feed(text))
            if sequence.stops.match is not None:
                self._finish_by_string(sequence)
                if new.logprobs is not None and sequence.cumulative_logprob is not None:  # the tokens cut off
                    sequence.cumulative_logprob -= sum(entry.logprobs[0] for entry in new.logprobs[i + 1 :])
                return new.finish_reason is None
        self._finish(sequence, new)
        return False

    def _finish(self, sequence: _Sequence, new: SequenceDelta) -> None:
        if new.finish_reason is not None:
            sequence.finish_reason, sequence.stop_reason = new.finish_reason, new.stop_reason
            self._flush(sequence)

    def _send(self, sequence: _Sequence, text: str) -> None:
        if text:
            sequence.new_text.append(text)

    def _finish_by_string(self, sequence: _Sequence) -> None:
        assert sequence.stops.match is not None
        sequence.finish_reason, sequence.stop_reason = "stop", sequence.stops.match.string

    def _flush(self, sequence: _Sequence) -> None:
        """The output is over: send what was held, which may still show a stop string."""
        if sequence.detokenizer is None:
            return
        for token_id in sequence.unread:
            self._send(sequence, sequence.detokenizer.append(token_id))
        self._send(sequence, sequence.stops.feed(sequence.detokenizer.flush(), num_tokens=0))
        if sequence.stops.match is not None:
            self._finish_by_string(sequence)
        else:
            self._send(sequence, sequence.stops.flush())

    def _output(self, state: _Request, *, finished: bool) -> RequestOutput | None:
        if state.stream:
            news = [sequence for sequence in state.sequences if sequence.has_news]
            if not news and not finished and not state.new_prompt_logprobs:
                return None
            outputs = [sequence.take() for sequence in news]
        elif finished:
            outputs = [sequence.take(index) for index, sequence in enumerate(_best(state))]
        else:
            return None
        prompt_logprobs = state.new_prompt_logprobs
        if prompt_logprobs is not None:
            state.new_prompt_logprobs = []
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=state.metrics,
            embedding=state.embedding,
        )

    def _fail(self, state: _Request, delta: RequestDelta) -> RequestOutput:
        del self._requests[delta.request_id]
        return self._error_output(state, _ERRORS.get(delta.error_kind or "", PlancastError)(delta.error))

    def _error_output(self, state: _Request, error: PlancastError) -> RequestOutput:
        state.metrics.finished_time = time.monotonic()
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=[],
            finished=True,
            metrics=state.metrics,
            error=error,
        )

    def _add_prompt_logprobs(self, state: _Request, entries: list[TokenLogprobs | None]) -> None:
        skipped = min(state.skip_prompt_logprobs, len(entries))
        state.skip_prompt_logprobs -= skipped
        entries = entries[skipped:]
        state.num_prompt_logprobs += len(entries)
        if state.new_prompt_logprobs is not None:
            with_text = state.request.params.detokenize
            state.new_prompt_logprobs.extend(
                None if entry is None else self._logprobs(entry, with_text) for entry in entries
            )

    def _logprobs(self, entry: TokenLogprobs, with_text: bool) -> dict[int, Logprob]:
        """By token id: the sampled token first, then the likeliest (the sampled one is not repeated)."""
        tokenizer = self._tokenizer if with_text else None
        result: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            if token_id in result:
                continue
            if tokenizer is None:
                result[token_id] = Logprob(logprob, rank)
            else:
                result[token_id] = Logprob(
                    logprob, rank, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
                )
        return result


def _best(state: _Request) -> list[_Sequence]:
    """The n sequences to return: of `best_of`, those with the highest cumulative log probability."""
    params = state.request.params
    if params.beam_width > 0:  # there may be fewer hypotheses than n
        return [sequence for sequence in state.sequences if sequence.finish_reason is not None]
    if params.num_sequences == params.n:
        return state.sequences
    ranked = sorted(
        state.sequences,
        key=lambda sequence: -float("inf") if sequence.cumulative_logprob is None else sequence.cumulative_logprob,
        reverse=True,
    )
    return ranked[: params.n]
