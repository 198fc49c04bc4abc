"""One workload through several engines that are loaded side by side, in interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.peers.environments import PeerError
from bench.peers.workers import Worker

if TYPE_CHECKING:
    from rich.table import Table

_WARM_UP_TOKENS = 8


@dataclass
class Row:
    """One workload through one engine. Lists hold a figure a round.

    Each round runs the workload twice: once for one token a request, which is the time to the first token of the whole
    batch, and once for all. The difference is decoding alone, measured from outside and so alike for every engine:
    TPOT = (E2EL - TTFT) / (output tokens - 1).
    """

    engine: str
    requests: int
    prompt_tokens: int  # of each request
    output_tokens: int
    first_seconds: list[float] = field(default_factory=list)  # until every request has its first token
    seconds: list[float] = field(default_factory=list)  # until every request has its last
    leading_tokens_equal: float = 0.0  # mean over the requests, compared with the first engine's

    @property
    def tokens_per_second(self) -> list[float]:
        """Output tokens over the whole time, the prompts' included."""
        return [self.requests * self.output_tokens / each for each in self.seconds]

    @property
    def decode_tokens_per_second(self) -> list[float]:
        """Requests / TPOT. Empty where the answers have one token, or are too short to be told from the first."""
        decoding = [whole - first for whole, first in zip(self.seconds, self.first_seconds, strict=True)]
        if self.output_tokens < 2 or min(decoding) <= 0:
            return []
        return [self.requests * (self.output_tokens - 1) / each for each in decoding]

    @property
    def prefill_tokens_per_second(self) -> list[float]:
        """Prompt tokens until every request has its first token."""
        return [self.requests * self.prompt_tokens / each for each in self.first_seconds]

    def report(self) -> dict[str, Any]:
        """Every figure, and the medians over the rounds."""
        decode = self.decode_tokens_per_second
        return {
            "engine": self.engine,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "first_seconds": self.first_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": decode,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "median": statistics.median(self.tokens_per_second),
            "decode_median": statistics.median(decode) if decode else None,
            "prefill_median": statistics.median(self.prefill_tokens_per_second),
            "leading_tokens_equal": self.leading_tokens_equal,
        }


def measure(
    workers: Sequence[Worker],
    prompts: list[list[int]],
    output_tokens: int,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Interleaved rounds of one workload; the order turns each round, so that no engine always follows another.

    Raises `PeerError` where an engine does not produce just `output_tokens` a request.
    """
    rows = [Row(worker.name, len(prompts), len(prompts[0]), output_tokens) for worker in workers]
    texts: list[list[list[int]]] = [[] for _ in workers]
    for worker in workers:
        worker.run(prompts, min(_WARM_UP_TOKENS, output_tokens))
    for turn in range(rounds):
        shift = turn % len(workers)
        for at in [*range(shift, len(workers)), *range(shift)]:
            rows[at].first_seconds.append(_run(workers[at], prompts, 1)[0])
            seconds, texts[at] = _run(workers[at], prompts, output_tokens)
            rows[at].seconds.append(seconds)
        on_round(turn + 1)
    for row, outputs in zip(rows, texts, strict=True):
        row.leading_tokens_equal = statistics.fmean(map(_leading_equal, outputs, texts[0]))
    return rows


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round; empty where either was not measured."""
    return [a / b for a, b in zip(numerators, denominators, strict=False)]


def spread(values: Sequence[float]) -> str:
    """Median and range of ratios, as tables show them; empty for none."""
    return f"{statistics.median(values):.2f} x ({min(values):.2f}-{max(values):.2f})" if values else ""


def tables(rows: Sequence[dict[str, Any]], heading: str, ratio: str, decode_ratio: str) -> Iterator[Table]:
    """A table for each number of requests: medians, and under `heading` the ratios that lie in its rows by these keys.

    Each workload's first row is what the others are compared with.
    """
    from rich.table import Table

    for count in dict.fromkeys(row["requests"] for row in rows):
        chosen = [row for row in rows if row["requests"] == count]
        load = f"{count} x ({chosen[0]['prompt_tokens']} tokens in + {chosen[0]['output_tokens']} out)"
        table = Table(title=load, title_justify="left")
        table.add_column("engine", overflow="fold")
        for title in ("tokens/s", heading, "decode", heading, "prefill"):
            table.add_column(title, justify="right")
        for number, row in enumerate(chosen):
            table.add_row(
                row["engine"],
                f"{row['median']:.1f}",
                spread(row[ratio]) if number else "",
                "-" if row["decode_median"] is None else f"{row['decode_median']:.1f}",
                spread(row[decode_ratio]) if number else "",
                f"{row['prefill_median']:.0f}",
            )
        yield table


def _run(worker: Worker, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    seconds, outputs = worker.run(prompts, tokens)
    lengths = {len(output) for output in outputs}
    if len(outputs) != len(prompts) or lengths != {tokens}:
        raise PeerError(
            f"{worker.name} answered {len(outputs)} of {len(prompts)} requests,"
            f" with {sorted(lengths)} tokens, not {tokens} each"
        )
    return seconds, outputs


def _leading_equal(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
