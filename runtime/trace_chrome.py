"""The iteration log as a trace that Perfetto and chrome://tracing open (Trace Event Format)."""

from __future__ import annotations

from typing import Any

from runtime.trace_view import Trace, step_end

_CORE, _REQUESTS = 1, 2  # process ids


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """One thread a sequence, the core's own steps by phase, and counters of tokens and KV blocks. Microseconds."""
    events: list[dict[str, Any]] = [
        _meta("process_name", _CORE, 0, "engine core"),
        _meta("process_name", _REQUESTS, 0, "requests"),
        _meta("thread_name", _CORE, 1, "steps"),
    ]
    for step in trace.steps:
        start = step.t
        args = {"step": step.step, "sequences": len(step.seqs), "running": step.running, "waiting": step.waiting}
        args |= {"prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens, "copies": step.copies}
        events.append(_slice(f"step {step.step}", _CORE, 1, start, step_end(step), args))
        for name, ms in zip(("schedule", "build", "run", "process"), step.ms, strict=True):
            events.append(_slice(name, _CORE, 1, start, start + ms / 1e3, {}))
            start += ms / 1e3
        used = trace.header.num_blocks - step.free_blocks
        events.append(_counter("KV blocks", step.t, {"used": used, "cached": step.idle_blocks}))
        tokens = {"decode": step.decode_tokens, "prefill": step.prefill_tokens}
        events.append(_counter("tokens", step.t, tokens))
        events.append(_counter("requests", step.t, {"running": step.running, "waiting": step.waiting}))
    thread = 0
    for life in trace.requests:
        for sequence in life.sequences.values():
            thread += 1
            name = life.request_id if sequence.index == 0 else f"{life.request_id} [{sequence.index}]"
            events.append(_meta("thread_name", _REQUESTS, thread, name))
            for phase in sequence.phases:
                args = {"tokens": phase.tokens, "steps": phase.steps}
                events.append(_slice(phase.kind, _REQUESTS, thread, phase.start, phase.end, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, process: int, thread: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": round(start * 1e6, 1)}
    return event | {"dur": round(max(0.0, end - start) * 1e6, 1), "args": args}


def _counter(name: str, t: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _CORE, "tid": 0, "ts": round(t * 1e6, 1), "args": values}
