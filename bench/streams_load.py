"""Many streams at once against a real server: is anything lost, and what does the server cost?

    python -m bench.streams_load hold ARTIFACT --streams 200 --seconds 300
    python -m bench.streams_load overhead ARTIFACT --streams 16
    python -m bench.streams_load ttft ARTIFACT

`hold` keeps so many streams open: as one ends, the next begins. Each must end with its own finish reason and hold the
very text that the same request gives unstreamed and alone (greedy; use an f32 engine, whose answers do not depend on
the batch). `overhead` compares the server's tokens/s with the same requests through the engine in this process.
`ttft` compares a short prompt's first token beside 15 others that decode with that on an idle server.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.prompts import prompts_of_length
from bench.report import run_script
from bench.serving.client import Endpoint, Reply, fetch, stream
from bench.serving.local import LocalServer, serving
from bench.serving.metrics import percentile

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
ROUTE = "/v1/completions"


# What is asked


def request_bodies(artifact: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy requests with prompts of 8 to 64 tokens and answers of 16 to 64, the same ones for a seed."""
    from runtime.tokenizer import Tokenizer

    rng = random.Random(seed)
    lengths = [rng.randint(8, 64) for _ in range(count)]
    prompts = prompts_of_length(Tokenizer.load(artifact).encode, lengths)
    return [
        {"prompt": prompt, "max_tokens": rng.randint(16, 64), "temperature": 0, "seed": number}
        for number, prompt in enumerate(prompts)
    ]


@dataclass(slots=True)
class Holding:
    """What holding many streams came to. Times in seconds."""

    streams: int
    seconds: float
    completed: int = 0
    lost: list[str] = field(default_factory=list)
    wrong_text: list[str] = field(default_factory=list)
    wrong_reason: list[str] = field(default_factory=list)
    tokens: int = 0
    tokens_per_second: float = 0.0
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    longest_gap: float = 0.0
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def is_good(self) -> bool:
        return self.completed > 0 and not (self.lost or self.wrong_text or self.wrong_reason)


async def hold_streams(endpoint: Endpoint, bodies: list[dict[str, Any]], streams: int, seconds: float) -> Holding:
    """Keep `streams` streams going for `seconds`, then let those that run end."""
    expected = [(await fetch(endpoint, "POST", ROUTE, body))["choices"][0] for body in bodies]
    report = Holding(streams, seconds)
    firsts: list[float] = []
    started = time.perf_counter()

    async def worker(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() - started < seconds:
            which = rng.randrange(len(bodies))
            result = await stream(endpoint, ROUTE, bodies[which])
            if result.error is not None or not result.done:
                report.lost.append(f"request {which}: {result.error or 'the stream ended without [DONE]'}")
                continue
            report.completed += 1
            report.tokens += result.output_tokens
            report.longest_gap = max(report.longest_gap, *result.gaps, 0.0)
            firsts.append(result.ttft)
            if result.text != expected[which]["text"]:
                report.wrong_text.append(f"request {which}: {result.text!r} is not {expected[which]['text']!r}")
            if result.finish_reason != expected[which]["finish_reason"]:
                report.wrong_reason.append(f"request {which}: {result.finish_reason}")

    await asyncio.gather(*map(worker, range(streams)))
    report.seconds = time.perf_counter() - started
    report.tokens_per_second = report.tokens / report.seconds
    report.ttft_p50, report.ttft_p99 = percentile(firsts, 0.5), percentile(firsts, 0.99)
    return report


def show(figures: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


def finish(report: Any, json_file: Path | None) -> None:
    """Write the figures where they were asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=2) + "\n")


ARTIFACT = Annotated[Path, typer.Argument(help="An artifact's folder.")]
JSON = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures here.")]


@app.command()
def hold(
    artifact: ARTIFACT,
    streams: Annotated[int, typer.Option(min=1)] = 200,
    seconds: Annotated[float, typer.Option(min=1)] = 300.0,
    requests: Annotated[int, typer.Option(min=1, help="Different requests.")] = 64,
    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: JSON = None,
) -> None:
    """Hold many streams; exit code 1 where one is lost or says anything else than it does alone."""
    options = ["--max-num-seqs", str(max_num_seqs)] if max_num_seqs else []
    with serving(artifact, *options) as server:
        report = asyncio.run(hold_streams(Endpoint(server.url), request_bodies(artifact, requests), streams, seconds))
    finish(report, json_file)
    show(
        {
            "streams": streams,
            "seconds": f"{report.seconds:.0f}",
            "completed": report.completed,
            "lost": len(report.lost),
            "wrong text": len(report.wrong_text),
            "wrong reason": len(report.wrong_reason),
            "tokens/s": f"{report.tokens_per_second:.0f}",
            "TTFT p50, p99": f"{report.ttft_p50:.2f} s, {report.ttft_p99:.2f} s",
            "longest gap": f"{report.longest_gap:.2f} s",
        }
    )
    for problem in (*report.lost, *report.wrong_text, *report.wrong_reason)[:10]:
        Console(stderr=True).print(problem, markup=False)
    raise typer.Exit(0 if report.is_good else 1)


@dataclass(slots=True)
class Overhead:
    """Output tokens a second, and processor milliseconds a token (all threads, the client's left out), a round each."""

    streams: int
    in_process: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    in_process_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def share(self) -> float:
        """What the server loses, of the in-process engine's median."""
        return 1 - statistics.median(self.server) / statistics.median(self.in_process)

    @property
    def cpu_share(self) -> float:
        """What the server takes beyond the in-process engine's processor time: steadier where others work, too."""
        return statistics.median(self.server_cpu) / statistics.median(self.in_process_cpu) - 1


async def in_process_rate(artifact: Path, bodies: list[dict[str, Any]]) -> tuple[float, float]:
    """The same requests through `AsyncLLM` with the engine in this process: tokens/s, processor ms a token."""
    from runtime.async_llm import AsyncLLM
    from runtime.sampling_params import SamplingParams

    async with await AsyncLLM.start(artifact, in_process=True) as llm:

        async def one(body: dict[str, Any]) -> int:
            params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
            outputs = llm.generate({"prompt_token_ids": body["prompt"]}, params)
            return sum([len(sequence.token_ids) async for output in outputs for sequence in output.outputs])

        await one(bodies[0])
        started, cpu = time.perf_counter(), time.process_time()
        tokens = sum(await asyncio.gather(*map(one, bodies)))
        return tokens / (time.perf_counter() - started), (time.process_time() - cpu) * 1e3 / tokens


async def server_rate(server: LocalServer, bodies: list[dict[str, Any]]) -> tuple[float, float]:
    """Through the server: tokens/s, processor ms a token."""
    endpoint = Endpoint(server.url)
    await asked(endpoint, bodies[0])
    started, cpu = time.perf_counter(), server.cpu_seconds()
    results = await asyncio.gather(*(asked(endpoint, body) for body in bodies))
    seconds, spent = time.perf_counter() - started, server.cpu_seconds() - cpu
    tokens = sum(result.output_tokens for result in results)
    return tokens / seconds, spent * 1e3 / tokens


async def asked(endpoint: Endpoint, body: dict[str, Any]) -> Reply:
    """A streamed answer, or the end of the measurement."""
    reply = await stream(endpoint, ROUTE, body)
    if reply.error is not None:
        raise SystemExit(f"a request failed: {reply.error}")
    return reply


@app.command()
def overhead(
    artifact: ARTIFACT,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved.")] = 5,
    json_file: JSON = None,
) -> None:
    """The server's throughput against the engine's in this process."""
    bodies = [body | {"max_tokens": output_tokens, "ignore_eos": True} for body in request_bodies(artifact, streams)]
    report = Overhead(streams)
    for _ in range(rounds):
        rate, cpu = asyncio.run(in_process_rate(artifact, bodies))
        report.in_process.append(rate)
        report.in_process_cpu.append(cpu)
        with serving(artifact) as server:
            rate, cpu = asyncio.run(server_rate(server, bodies))
        report.server.append(rate)
        report.server_cpu.append(cpu)
    finish(report, json_file)
    show(
        {
            "streams": streams,
            "in-process tokens/s": f"{statistics.median(report.in_process):.1f}",
            "server tokens/s": f"{statistics.median(report.server):.1f}",
            "overhead": f"{report.share:.1%}",
            "in-process processor ms/token": f"{statistics.median(report.in_process_cpu):.2f}",
            "server processor ms/token": f"{statistics.median(report.server_cpu):.2f}",
            "overhead in processor time": f"{report.cpu_share:.1%}",
        }
    )


@dataclass(slots=True)
class FirstToken:
    """Seconds. `step` is the others' median time between tokens."""

    others: int
    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    step: float = 0.0
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def steps_above_idle(self) -> float:
        return (statistics.median(self.busy) - statistics.median(self.idle)) / self.step


async def measure_first_token(endpoint: Endpoint, bodies: list[dict[str, Any]], rounds: int) -> FirstToken:
    report = FirstToken(len(bodies))
    short = {"prompt": "Hello there", "max_tokens": 1, "temperature": 0}
    for number in range(rounds):
        report.idle.append((await asked(endpoint, short | {"cache_salt": f"idle{number}"})).ttft)
    background = [asyncio.create_task(asked(endpoint, body)) for body in bodies]
    await asyncio.sleep(3)
    for number in range(rounds):
        report.busy.append((await asked(endpoint, short | {"cache_salt": f"busy{number}"})).ttft)
    others = await asyncio.gather(*background)
    report.step = statistics.median(other.tpot for other in others)
    return report


@app.command()
def ttft(
    artifact: ARTIFACT,
    others: Annotated[int, typer.Option(min=1)] = 15,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of the others: enough to outlast the rounds.")] = 200,
    json_file: JSON = None,
) -> None:
    """A short prompt's first token beside others that decode."""
    bodies = [body | {"max_tokens": output_tokens, "ignore_eos": True} for body in request_bodies(artifact, others)]
    with serving(artifact) as server:
        report = asyncio.run(measure_first_token(Endpoint(server.url), bodies, rounds))
    finish(report, json_file)
    show(
        {
            "others": others,
            "idle TTFT": f"{statistics.median(report.idle) * 1e3:.1f} ms",
            "busy TTFT": f"{statistics.median(report.busy) * 1e3:.1f} ms",
            "step": f"{report.step * 1e3:.1f} ms",
            "steps above idle": f"{report.steps_above_idle:.2f}",
        }
    )


if __name__ == "__main__":
    run_script(app)
