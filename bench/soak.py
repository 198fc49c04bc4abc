"""Many requests through one engine: does anything grow? Memory, threads, open files, before and after.

    python -m bench.soak ARTIFACT --requests 10000

The mix holds what leaks if anything does: streams read to the end and streams left in the middle, several sequences,
stop strings, log probabilities, shared prefixes, and requests that are refused. `--kill-every N` also kills the
engine after every N requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.report import run_script
from runtime.async_llm import AsyncLLM
from runtime.errors import RequestError
from runtime.sampling_params import SamplingParams

_MIB = 1 << 20
# The share of the run after which growth counts: caches and pools have filled by then.
_WARM_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at both processes. Memory in bytes (resident); of the engine 0 where it runs in-process."""

    requests: int
    seconds: float
    client_bytes: int
    engine_bytes: int
    client_threads: int
    client_files: int
    engine_files: int


@dataclass(frozen=True, slots=True)
class SoakReport:
    """All samples, and what they come to. Growth is the least-squares slope after warming up."""

    requests: int
    refused: int
    left_early: int
    restarts: int
    tokens: int
    seconds: float
    client_bytes_per_request: float
    engine_bytes_per_request: float
    samples: list[Sample]


async def soak(
    artifact: Path,
    *,
    requests: int = 10_000,
    concurrency: int = 32,
    max_tokens: int = 24,
    kill_every: int = 0,
    num_samples: int = 50,
    seed: int = 0,
    in_process: bool = False,
    show: bool = True,
) -> SoakReport:
    """Run the mix and measure. Raises `AssertionError` where blocks or requests are left when all is over."""
    rng = random.Random(seed)
    llm = await AsyncLLM.start(artifact, in_process=in_process, max_restarts=1 << 30)
    counts = {"done": 0, "refused": 0, "left": 0, "tokens": 0}
    samples: list[Sample] = []
    started = time.monotonic()
    shared = [rng.randrange(llm.manifest.model.vocab_size) for _ in range(llm.max_context_len // 4)]

    async def one() -> None:
        prompt, params = _request(rng, llm, shared, max_tokens)
        leaves = rng.random() < 0.1
        try:
            async with llm.generate(prompt, params) as stream:
                async for output in stream:
                    counts["tokens"] += sum(len(sequence.token_ids) for sequence in output.outputs)
                    if leaves:
                        counts["left"] += 1
                        break
        except RequestError:
            counts["refused"] += 1
        counts["done"] += 1
        if counts["done"] % max(1, requests // num_samples) == 0:
            samples.append(_sample(llm, counts["done"], started))
            if show:
                print(_line(samples[-1]), flush=True)
        if kill_every and counts["done"] % kill_every == 0:
            os.kill(llm.ready.pid, signal.SIGKILL)

    async def worker(share: int) -> None:
        for _ in range(share):
            await one()

    async with llm:
        shares = [requests // concurrency + (i < requests % concurrency) for i in range(concurrency)]
        await asyncio.gather(*map(worker, shares))
        stats = await llm.stats()
        assert stats.num_running == stats.num_waiting == 0, stats
        assert stats.num_free_blocks == stats.num_blocks, stats
        assert llm.num_unfinished == 0
        restarts = llm.num_restarts
    warm = [sample for sample in samples if sample.requests >= _WARM_SHARE * requests]
    return SoakReport(
        requests=counts["done"],
        refused=counts["refused"],
        left_early=counts["left"],
        restarts=restarts,
        tokens=counts["tokens"],
        seconds=time.monotonic() - started,
        client_bytes_per_request=_slope([(sample.requests, sample.client_bytes) for sample in warm]),
        engine_bytes_per_request=_slope([(sample.requests, sample.engine_bytes) for sample in warm]),
        samples=samples,
    )


def _request(rng: random.Random, llm: AsyncLLM, shared: list[int], max_tokens: int) -> tuple[list[int], SamplingParams]:
    vocab_size, limit = llm.manifest.model.vocab_size, llm.max_context_len
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, limit // 4))]
    if rng.random() < 0.3:
        prompt = shared[: rng.randint(1, len(shared))] + prompt
    params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, max_tokens), ignore_eos=True)
    kind = rng.random()
    if kind < 0.1:
        params.n, params.temperature = 2, 1.0
    elif kind < 0.2:
        params.logprobs, params.prompt_logprobs = 2, 1
    elif kind < 0.3:
        params.stop = ["e", "the"]
    elif kind < 0.4:
        params.temperature, params.seed, params.top_p = 0.9, rng.randrange(1 << 30), 0.9
    elif kind < 0.43:
        params.max_tokens = limit
    return prompt, params


def _sample(llm: AsyncLLM, requests: int, started: float) -> Sample:
    engine = llm.ready.pid if llm.ready.pid != os.getpid() else None
    return Sample(
        requests=requests,
        seconds=time.monotonic() - started,
        client_bytes=_resident(os.getpid()),
        engine_bytes=0 if engine is None else _resident(engine),
        client_threads=threading.active_count(),
        client_files=_open_files(os.getpid()),
        engine_files=0 if engine is None else _open_files(engine),
    )


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # killed a moment ago
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _slope(points: list[tuple[int, int]]) -> float:
    """The least-squares slope of y over x."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def _line(sample: Sample) -> str:
    return (
        f"{sample.requests:7d} requests {sample.seconds:7.1f} s | client {sample.client_bytes / _MIB:7.1f} MiB "
        f"{sample.client_threads} threads {sample.client_files} files | engine {sample.engine_bytes / _MIB:7.1f} MiB "
        f"{sample.engine_files} files"
    )


def main(
    artifact: Annotated[Path, typer.Argument(help="The artifact to run.")],
    requests: Annotated[int, typer.Option(min=1)] = 10_000,
    concurrency: Annotated[int, typer.Option(min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one request, at most.")] = 24,
    kill_every: Annotated[int, typer.Option(min=0, help="Kill the engine after every so many requests.")] = 0,
    in_process: Annotated[bool, typer.Option("--in-process", help="The engine runs in this process.")] = False,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Run many requests of all kinds and report what grows."""
    report = asyncio.run(
        soak(
            artifact,
            requests=requests,
            concurrency=concurrency,
            max_tokens=max_tokens,
            kill_every=kill_every,
            in_process=in_process,
            seed=seed,
        )
    )
    print(
        f"{report.requests} requests ({report.left_early} left early, {report.refused} refused, "
        f"{report.restarts} restarts), {report.tokens} tokens in {report.seconds:.0f} s\n"
        f"growth after warming up: client {report.client_bytes_per_request:+.0f} bytes a request, "
        f"engine {report.engine_bytes_per_request:+.0f} bytes a request"
    )
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=2) + "\n")


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
