"""Every generation in flight, as metrics, the log and the live page see it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server.metrics import Metrics
from runtime.server.tracing import Tracer


@dataclass(slots=True)
class Record:
    """One generation. Times are `time.monotonic()` seconds, counts are tokens over all its sequences."""

    request_id: str
    model: str
    route: str
    prompt_tokens: int
    params: SamplingParams
    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds an output token of one sequence after the first; None before there are two."""
        per_sequence = self.output_tokens / max(1, self.params.num_sequences)
        if self.first_token is None or self.last_token is None or per_sequence <= 1:
            return None
        return (self.last_token - self.first_token) / (per_sequence - 1)


class Tracker:
    """The generations in flight, and what the latest finished ones measured."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None = None, keep: int = 512):
        self.metrics = metrics
        self.tracer = tracer
        self.active: dict[str, Record] = {}
        self.recent_ttft: deque[float] = deque(maxlen=keep)
        self.recent_tpot: deque[float] = deque(maxlen=keep)
        self.output_tokens = 0  # since the start; only grows
        self.mean_seconds = 1.0  # of a request, exponentially averaged

    def start(self, record: Record) -> None:
        self.active[record.request_id] = record
        self.metrics.started(record)

    def observe(self, record: Record, output: RequestOutput) -> None:
        """Count what a delta brought."""
        tokens = 0
        for sequence in output.outputs:
            tokens += len(sequence.token_ids)
            if sequence.finish_reason is not None:
                record.finish_reasons[sequence.index] = sequence.finish_reason
        record.scheduled = output.metrics.first_scheduled_time
        record.cached_tokens = output.metrics.num_cached_tokens
        if not tokens:
            return
        now = time.monotonic()
        if record.first_token is None:
            record.first_token = now
            self.recent_ttft.append(now - record.arrival)
            self.metrics.first_token(record)
        elif record.last_token is not None:
            self.metrics.next_tokens(record, now - record.last_token)
        record.last_token = now
        record.output_tokens += tokens
        self.output_tokens += tokens

    def finish(self, record: Record) -> None:
        """The generation is over: finished, aborted or failed."""
        if self.active.pop(record.request_id, None) is None:
            return
        if (tpot := record.tpot) is not None:
            self.recent_tpot.append(tpot)
        self.mean_seconds += 0.1 * (time.monotonic() - record.arrival - self.mean_seconds)
        self.metrics.finished(record)
        if self.tracer is not None:
            self.tracer.finished(record)
