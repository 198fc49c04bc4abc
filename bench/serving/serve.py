"""`plancast bench serve`: one workload against a running server, or one of our own, at one or several loads."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.serving.client import Endpoint, Reply
from bench.serving.local import serving
from bench.serving.metrics import latencies, percentile, summarize, timeline
from bench.serving.run import Target, find_model, play, warm_up
from bench.serving.workload import Ask, Encode, Workload, poisson
from runtime.errors import PlancastError

_CDF_POINTS = 101
_MAX_STEPS = 4000  # of an iteration log, the last ones, that a report keeps


@dataclass(frozen=True, slots=True)
class Load:
    """One run: what is asked, and how it arrives: so many at a time, a rate (a second), or the workload's own times."""

    workload: Workload
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    swept: bool = False  # runs differ in the length of their prompts, so the label says it

    @property
    def label(self) -> str:
        parts = [f"{self.workload.inputs} tokens in"] if self.swept else []
        if self.rate is not None:
            parts.append(f"{self.rate:g} requests/s")
        if self.concurrency is not None:
            parts.append(f"{self.concurrency} at a time")
        return ", ".join(parts) or "as in the trace"

    def arrivals(self, asks: Sequence[Ask], seed: int) -> list[float] | None:
        if self.rate is not None:
            return poisson(len(asks), self.rate, self.burstiness, seed)
        times = [ask.at for ask in asks if ask.at is not None]
        return times if len(times) == len(asks) else None


def tokenizer_of(artifact_or_folder: Path | None) -> Encode | None:
    """What counts tokens: the folder's tokenizer.json. Raises `ArtifactError` where there is none."""
    if artifact_or_folder is None:
        return None
    from runtime.tokenizer import Tokenizer

    return Tokenizer.load(artifact_or_folder).encode


@contextlib.contextmanager
def opened(target: str, serve_arguments: Sequence[str], log: Path) -> Iterator[str]:
    """The URL to ask. A server of our own writes its iteration log into `log`."""
    if target.startswith(("http://", "https://")):
        if serve_arguments:
            raise PlancastError("--serve-argument is for a server that is started here; the target is a URL")
        yield target
        return
    if not Path(target).is_dir():
        raise PlancastError(f"{target!r} is neither an artifact's folder nor a URL (http://host:port)")
    with serving(Path(target), "--iteration-log", str(log), *serve_arguments) as server:
        yield server.url


def bench_serve(
    target: str,
    loads: Sequence[Load],
    encode: Encode | None,
    *,
    model: str | None = None,
    api: str = "completions",
    api_key: str | None = None,
    extra: dict[str, Any] | None = None,
    ignore_eos: bool = True,
    goodput: dict[str, float] | None = None,
    warmup: int = 1,
    seed: int = 0,
    serve_arguments: Sequence[str] = (),
    on_run: Callable[[str, int], None] = lambda *_: None,
    on_reply: Callable[[Reply], None] = lambda _: None,
) -> dict[str, Any]:
    """Run each load in turn, and return the report.

    Args:
        target: a URL, or an artifact's folder, which is then served for the time of the measurement.
        encode: a text to its token ids; None where only the server can tell.
        on_run: told each run's label and number of requests as it begins; `on_reply` of each answer.

    Raises:
        PlancastError: there is no such target, or the first request fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "steps.jsonl"
        with opened(target, serve_arguments, log) as url:
            endpoint = Endpoint(url, api_key)
            name = asyncio.run(find_model(endpoint, model))
            asked = Target(endpoint, name, api, extra, ignore_eos)
            asyncio.run(warm_up(asked, loads[0].workload.asks(encode, -1)[:warmup]))
            runs = []
            for number, load in enumerate(loads):
                asks = load.workload.asks(encode, number)
                on_run(load.label, len(asks))
                replies, begin, seconds = asyncio.run(
                    play(
                        asked,
                        asks,
                        concurrency=load.concurrency,
                        arrivals=load.arrivals(asks, seed + number),
                        seed=seed,
                        on_reply=on_reply,
                    )
                )
                runs.append(describe_run(load, replies, begin, seconds, goodput or {}))
        steps = read_steps(log) if log.exists() else []
    return {
        "machine": describe_machine(),
        "target": target,
        "model_id": name,
        "api": api,
        "seed": seed,
        "goodput_ms": goodput or {},
        "runs": runs,
        "steps": steps,
    }


def describe_run(
    load: Load, replies: Sequence[Reply], begin: float, seconds: float, goodput: dict[str, float]
) -> dict[str, Any]:
    """One run's entry in the report: figures, distributions and timeline."""
    good = [reply for reply in replies if reply.error is None]
    cdf = {
        name: [percentile(values, share / (_CDF_POINTS - 1)) for share in range(_CDF_POINTS)]
        for name, values in latencies(good).items()
        if values
    }
    errors: dict[str, int] = {}
    for reply in replies:
        if reply.error is not None:
            errors[reply.error] = errors.get(reply.error, 0) + 1
    figures = summarize(replies, seconds, goodput)
    return {
        "load": load.label,
        "max_concurrency": load.concurrency,
        "request_rate": load.rate,
        "workload": load.workload.described,
        "input_tokens": load.workload.inputs if load.workload.path is None else None,
        "num_prompts": len(replies),
        # JSON has no NaN.
        **{name: None if isinstance(value, float) and math.isnan(value) else value for name, value in figures.items()},
        "errors": errors,
        "cdf_ms": cdf,
        "timeline": timeline(good, begin),
    }


def read_steps(log: Path) -> list[list[float]]:
    """The last steps of an iteration log: [seconds, decode tokens, prefill tokens, milliseconds] each."""
    from runtime.iteration_log import read_log

    _, steps, _ = read_log(str(log))
    return [[step.t, step.decode_tokens, step.prefill_tokens, sum(step.ms)] for step in steps[-_MAX_STEPS:]]
