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
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.prompts import prompts_of_length

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
START_S = 120.0


# A server of our own, and a client that costs little


@contextlib.contextmanager
def serving(artifact: Path, *arguments: str) -> Iterator[tuple[str, int]]:
    """`plancast serve` on a free port until the end of the block: (host, port)."""
    command = [sys.executable, "-m", "plancast", "serve", str(artifact), "--port", "0", *arguments]
    # A file, not a pipe: a log that nobody reads must not stop the server.
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = subprocess.Popen(command, stderr=open(log.name, "w"))  # noqa: SIM115
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"at http://([\d.]+):(\d+)", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start:\n" + Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1], int(found[2])
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=START_S)
            process.kill()


async def post(address: tuple[str, int], body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The response's body as it comes, piece by piece. Raises `ConnectionError` for a status other than 200."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    try:
        writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + content)
        status = (await reader.readline()).split()[1]
        headers = await reader.readuntil(b"\r\n\r\n")
        if status != b"200":
            raise ConnectionError(f"{status.decode()}: {(await reader.read()).decode()}")
        if b"chunked" not in headers.lower():
            yield await reader.read()
            return
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    finally:
        writer.close()


@dataclass(slots=True)
class Stream:
    """What one stream brought. Times are seconds since it was asked for."""

    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    tokens: int = 0
    first: float | None = None
    last: float = 0.0
    longest_gap: float = 0.0


async def stream(address: tuple[str, int], body: dict[str, Any]) -> Stream:
    """Run a streamed completion to its end."""
    result, started = Stream(), time.perf_counter()
    buffer = b""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async for piece in post(address, body):
        now = time.perf_counter() - started
        *events, buffer = (buffer + piece).split(b"\n\n")
        spoke = False  # a keep-alive comment is no token
        for event in events:
            if event == b"data: [DONE]":
                result.done = True
                continue
            if not event.startswith(b"data: "):
                continue
            chunk = json.loads(event[6:])
            if "error" in chunk:
                raise ConnectionError(chunk["error"]["message"])
            if chunk.get("usage"):
                result.tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                spoke = True
                result.text += choice["text"]
                result.finish_reason = choice["finish_reason"] or result.finish_reason
        if not spoke:
            continue
        if result.first is None:
            result.first = now
        else:
            result.longest_gap = max(result.longest_gap, now - result.last)
        result.last = now
    return result


async def whole(address: tuple[str, int], body: dict[str, Any]) -> dict[str, Any]:
    """Run an unstreamed completion: its only choice."""
    content = b"".join([piece async for piece in post(address, body)])
    return json.loads(content)["choices"][0]


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


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


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


async def hold_streams(address: tuple[str, int], bodies: list[dict[str, Any]], streams: int, seconds: float) -> Holding:
    """Keep `streams` streams going for `seconds`, then let those that run end."""
    expected = [await whole(address, body) for body in bodies]
    report = Holding(streams, seconds)
    firsts: list[float] = []
    started = time.perf_counter()

    async def worker(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() - started < seconds:
            which = rng.randrange(len(bodies))
            try:
                result = await stream(address, bodies[which])
            except (OSError, EOFError, ValueError) as error:
                report.lost.append(f"request {which}: {type(error).__name__}: {error}")
                continue
            if not result.done:
                report.lost.append(f"request {which}: the stream ended without [DONE]")
                continue
            report.completed += 1
            report.tokens += result.tokens
            report.longest_gap = max(report.longest_gap, result.longest_gap)
            firsts.append(result.first or 0.0)
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
    with serving(artifact, *options) as address:
        report = asyncio.run(hold_streams(address, request_bodies(artifact, requests), streams, seconds))
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
    """Output tokens a second, one figure a round."""

    streams: int
    in_process: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def share(self) -> float:
        """What the server loses, of the in-process engine's median."""
        return 1 - statistics.median(self.server) / statistics.median(self.in_process)


async def in_process_rate(artifact: Path, bodies: list[dict[str, Any]]) -> float:
    """The same requests through `AsyncLLM` with the engine in this process."""
    from runtime.async_llm import AsyncLLM
    from runtime.sampling_params import SamplingParams

    async with await AsyncLLM.start(artifact, in_process=True) as llm:

        async def one(body: dict[str, Any]) -> int:
            params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
            outputs = llm.generate({"prompt_token_ids": body["prompt"]}, params)
            return sum([len(sequence.token_ids) async for output in outputs for sequence in output.outputs])

        await one(bodies[0])
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, bodies)))
        return tokens / (time.perf_counter() - started)


async def server_rate(address: tuple[str, int], bodies: list[dict[str, Any]]) -> float:
    await stream(address, bodies[0])
    started = time.perf_counter()
    results = await asyncio.gather(*(stream(address, body) for body in bodies))
    return sum(result.tokens for result in results) / (time.perf_counter() - started)


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
        report.in_process.append(asyncio.run(in_process_rate(artifact, bodies)))
        with serving(artifact) as address:
            report.server.append(asyncio.run(server_rate(address, bodies)))
    finish(report, json_file)
    show(
        {
            "streams": streams,
            "in-process tokens/s": f"{statistics.median(report.in_process):.1f}",
            "server tokens/s": f"{statistics.median(report.server):.1f}",
            "overhead": f"{report.share:.1%}",
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


async def measure_first_token(address: tuple[str, int], bodies: list[dict[str, Any]], rounds: int) -> FirstToken:
    report = FirstToken(len(bodies))
    short = {"prompt": "Hello there", "max_tokens": 1, "temperature": 0}
    for number in range(rounds):
        report.idle.append((await stream(address, short | {"cache_salt": f"idle{number}"})).first or 0.0)
    background = [asyncio.create_task(stream(address, body)) for body in bodies]
    await asyncio.sleep(3)
    for number in range(rounds):
        report.busy.append((await stream(address, short | {"cache_salt": f"busy{number}"})).first or 0.0)
    others = await asyncio.gather(*background)
    report.step = statistics.median((other.last - (other.first or 0.0)) / max(1, other.tokens - 1) for other in others)
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
    with serving(artifact) as address:
        report = asyncio.run(measure_first_token(address, bodies, rounds))
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
    app()
