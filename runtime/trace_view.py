"""From an iteration log to the life of each request: when it waited, was prefilled, decoded, and lay preempted."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.iteration_log import AdmittedRequest, LogEnd, LogHeader, LogStep

WAITING, PREFILL, DECODE, PREEMPTED = "waiting", "prefill", "decode", "preempted"


@dataclass(slots=True)
class Phase:
    """A stretch of a sequence's life, in seconds on the log's clock; `tokens` went through the model in it."""

    kind: str
    start: float
    end: float
    tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class SequenceLife:
    """One sequence's phases, end to end."""

    request_id: str
    index: int
    phases: list[Phase] = field(default_factory=list)


@dataclass(slots=True)
class RequestLife:
    """One request: what the log says of it as a whole. Times in seconds on the log's clock."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int
    forks_into: int = 1
    first_token: float | None = None
    end: float | None = None
    reason: str = "unfinished"
    output_tokens: int = 0
    preemptions: int = 0
    sequences: dict[int, SequenceLife] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A whole log. `requests` are in order of arrival."""

    header: LogHeader
    steps: list[LogStep]
    requests: list[RequestLife]

    @property
    def seconds(self) -> float:
        """From the log's first line to the end of its last step."""
        return step_end(self.steps[-1]) if self.steps else 0.0


def step_end(step: LogStep) -> float:
    """When the step ended, on the log's clock."""
    return step.t + sum(step.ms) / 1e3


def build_trace(header: LogHeader, steps: list[LogStep], ends: list[LogEnd]) -> Trace:
    """Follow every sequence through the steps."""
    requests: dict[str, RequestLife] = {}
    waiting_since: dict[str, float] = {}  # preempted requests
    for step in steps:
        for admitted in step.admitted:
            _admit(requests, waiting_since, admitted, step)
        end = step_end(step)
        for request_id, index, tokens, past, rows in step.seqs:
            life = requests.get(request_id)
            if life is not None:
                _advance(life, index, tokens, past, rows, step.t, end)
        for request_id in step.preempted:
            if request_id in requests:
                waiting_since[request_id] = step.t
                requests[request_id].preemptions += 1
    for ended in ends:
        life = requests.get(ended.request_id)
        if life is not None:
            life.end, life.reason = ended.t, ended.reason
    return Trace(header, steps, sorted(requests.values(), key=lambda life: life.arrival))


def _admit(
    requests: dict[str, RequestLife], waiting_since: dict[str, float], admitted: AdmittedRequest, step: LogStep
) -> None:
    life = requests.get(admitted.request_id)
    if life is None:
        life = requests[admitted.request_id] = RequestLife(
            admitted.request_id,
            admitted.arrival,
            admitted.num_prompt_tokens,
            admitted.num_cached_tokens,
            admitted.forks_into,
        )
        # What arrived before the log began waits from its edge on.
        wait = Phase(WAITING, max(0.0, min(admitted.arrival, step.t)), step.t)
        life.sequences[0] = SequenceLife(admitted.request_id, 0, [wait])
        return
    since = waiting_since.pop(admitted.request_id, None)
    if since is not None:
        for sequence in life.sequences.values():
            if sequence.phases:
                sequence.phases.append(Phase(PREEMPTED, since, step.t))


def _advance(life: RequestLife, index: int, tokens: int, past: int, rows: int, start: float, end: float) -> None:
    sequence = life.sequences.setdefault(index, SequenceLife(life.request_id, index))
    sampled = rows > 0 and past + tokens >= life.num_prompt_tokens
    if sampled:
        life.output_tokens += life.forks_into if life.first_token is None else 1
        if life.first_token is None:
            life.first_token = end
    kind = DECODE if past >= life.num_prompt_tokens and rows == tokens else PREFILL
    last = sequence.phases[-1] if sequence.phases else None
    if kind == DECODE and last is not None and last.kind == DECODE:
        last.end, last.tokens, last.steps = end, last.tokens + tokens, last.steps + 1
    else:
        sequence.phases.append(Phase(kind, start, end, tokens, 1))


def summarize(trace: Trace) -> dict[str, float | int]:
    """The log in figures. Times in seconds (`*_ms`: milliseconds a step), counts in tokens where the name says so."""
    steps, requests = trace.steps, trace.requests
    finished = [life for life in requests if life.reason == "finish"]
    waits = sorted(life.first_token - life.arrival for life in requests if life.first_token is not None)
    seconds = trace.seconds - (steps[0].t if steps else 0.0)
    output_tokens = sum(life.output_tokens for life in requests)
    summary: dict[str, float | int] = {
        "steps": len(steps),
        "seconds": seconds,
        "requests": len(requests),
        "finished": len(finished),
        "aborted": sum(life.reason == "abort" for life in requests),
        "preemptions": sum(life.preemptions for life in requests),
        "prompt_tokens": sum(life.num_prompt_tokens for life in requests),
        "cached_prompt_tokens": sum(life.num_cached_tokens for life in requests),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds if seconds else 0.0,
        "ttft_median": waits[len(waits) // 2] if waits else 0.0,
        "ttft_p99": waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0,
        "peak_blocks": max((trace.header.num_blocks - step.free_blocks for step in steps), default=0),
        "mean_sequences": sum(len(step.seqs) for step in steps) / len(steps) if steps else 0.0,
    }
    for place, name in enumerate(("schedule", "build", "run", "process")):
        summary[f"{name}_ms"] = sum(step.ms[place] for step in steps) / len(steps) if steps else 0.0
    return summary


def format_figure(value: float | int) -> str:
    """A figure of the summary, for people."""
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
