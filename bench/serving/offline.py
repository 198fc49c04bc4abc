"""`plancast bench throughput` and `plancast bench latency`: an engine in this process, without a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.serving.metrics import percentile
from bench.serving.workload import Ask
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)


def _prompt(ask: Ask) -> Any:
    return {"prompt_token_ids": ask.prompt} if isinstance(ask.prompt, list) else ask.prompt


def bench_throughput(
    artifact: Path,
    asks: Sequence[Ask],
    *,
    warmup: Sequence[Ask] = (),
    engine_options: dict[str, Any] | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Everything at once through `LLM`: the report. `on_done` is told of each request's output tokens as it ends."""
    with LLM(artifact, **(engine_options or {})) as llm:
        for ask in warmup:
            llm.generate([_prompt(ask)], _params(ask))
        begin = time.perf_counter()
        ends: list[float] = []
        inputs = outputs = 0
        for _, result in llm.as_completed([_prompt(ask) for ask in asks], [_params(ask) for ask in asks]):
            if result.error is not None:
                raise result.error
            made = sum(len(sequence.token_ids) for sequence in result.outputs)
            inputs, outputs = inputs + len(result.prompt_token_ids), outputs + made
            ends.append(time.perf_counter() - begin)
            on_done(made)
        elapsed = time.perf_counter() - begin
        name = llm.manifest.name
    return {
        "kind": "throughput",
        "machine": describe_machine(),
        "model_id": name,
        "figures": {
            "elapsed_time": elapsed,
            "num_requests": len(asks),
            "total_num_tokens": inputs + outputs,
            "num_input_tokens": inputs,
            "num_output_tokens": outputs,
            "requests_per_second": len(asks) / elapsed,
            "tokens_per_second": (inputs + outputs) / elapsed,
            "output_tokens_per_second": outputs / elapsed,
        },
        "series": [("Requests as they end", "seconds", ends, "requests", "seconds")],
    }


def bench_latency(
    artifact: Path,
    batches: Sequence[Sequence[Ask]],
    *,
    warmup: int = 1,
    engine_options: dict[str, Any] | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """One batch after another, each to its end; the first `warmup` are not counted. The report, times in seconds."""
    latencies: list[float] = []
    with LLM(artifact, **(engine_options or {})) as llm:
        for number, batch in enumerate(batches):
            begin = time.perf_counter()
            llm.generate([_prompt(ask) for ask in batch], [_params(ask) for ask in batch])
            if number >= warmup:
                latencies.append(time.perf_counter() - begin)
            on_done(sum(ask.output_tokens for ask in batch))
        name = llm.manifest.name
    return {
        "kind": "latency",
        "machine": describe_machine(),
        "model_id": name,
        "figures": {
            "avg_latency": statistics.fmean(latencies),
            "percentiles": {str(share): percentile(latencies, share / 100) for share in _PERCENTILES},
            "batch_size": len(batches[0]),
            "iterations": len(latencies),
            "output_tokens_per_second": sum(ask.output_tokens for ask in batches[0]) / statistics.median(latencies),
        },
        "latencies": latencies,
        "series": [("Latency of each batch", "seconds", latencies, "iteration", "seconds")],
    }
