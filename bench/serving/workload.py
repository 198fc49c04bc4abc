"""What is asked: texts of chosen lengths, a ShareGPT-format file, chats that share a prefix, a trace with its times."""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.prompts import prompts_of_length
from runtime.errors import PlancastError

# ShareGPT conversations outside these are left out, as in vLLM's benchmark (tokens).
_SHAREGPT_LEAST, _SHAREGPT_PROMPT, _SHAREGPT_TOTAL = 4, 1024, 2048

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prompt`: a text, or token ids. `at`: seconds after the start, in a trace."""

    prompt: str | list[int]
    output_tokens: int
    prompt_tokens: int | None = None  # where known beforehand
    system: str | None = None  # what a chat begins with
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides what is asked; lengths in tokens. Raises `PlancastError` where the file is missing."""

    dataset: str = "synthetic"  # synthetic | sharegpt | shared-prefix | trace
    path: Path | None = None
    count: int = 100
    inputs: int = 128
    outputs: int | None = None  # None: 128, or as long as the file's
    spread: float = 0.0
    prefix: int = 256
    prefixes: int = 4
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.dataset in ("sharegpt", "trace")) != (self.path is not None):
            need = "needs" if self.path is None else "takes no"
            raise PlancastError(f"--dataset {self.dataset} {need} --dataset-path")

    def asks(self, encode: Encode | None, number: int) -> list[Ask]:
        """The requests of run `number` (-1: the warm-up's), with prompts of their own where the dataset has enough."""
        seed = self.seed + 7919 * (number + 1)
        outputs = self.outputs or 128
        if self.dataset == "sharegpt":
            assert self.path is not None
            return sharegpt(self.path, encode, self.count, self.outputs, seed)
        if self.dataset == "trace":
            assert self.path is not None
            return trace(self.path, encode, self.count, self.speed, seed)
        if self.dataset == "shared-prefix":
            return shared_prefix(
                encode,
                self.count,
                prefixes=self.prefixes,
                prefix=self.prefix,
                inputs=self.inputs,
                outputs=outputs,
                seed=seed,
            )
        return synthetic(encode, self.count, self.inputs, outputs, self.spread, seed)

    @property
    def described(self) -> str:
        """It in a few words."""
        if self.path is not None:
            return f"{self.dataset} {self.path.name}, at most {self.count} requests"
        return f"{self.dataset}, {self.count} requests, {self.inputs} tokens in, {self.outputs or 128} out"


def synthetic(encode: Encode | None, count: int, inputs: int, outputs: int, spread: float, seed: int) -> list[Ask]:
    """Prompts of `inputs` tokens and answers of `outputs`, each drawn evenly from within `spread` (0..1) of that."""
    rng = random.Random(seed)
    lengths = [(_within(rng, inputs, spread), _within(rng, outputs, spread)) for _ in range(count)]
    prompts = _prompts(encode, [length for length, _ in lengths], seed)
    return [
        Ask(prompt, output, length if encode else None)
        for prompt, (length, output) in zip(prompts, lengths, strict=True)
    ]


def _within(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, rng.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))


def _prompts(encode: Encode | None, lengths: list[int], seed: int) -> list[str] | list[list[int]]:
    """Token ids of exact lengths; without a tokenizer, texts of about four characters a token.

    Each begins with a number of its own, so that no prefix cache knows it from another.
    """
    marks = [f"{seed * 100_003 + number}: " for number in range(len(lengths))]
    if encode is not None:
        texts = prompts_of_length(encode, lengths)
        return [(encode(mark) + text)[:length] for mark, text, length in zip(marks, texts, lengths, strict=True)]
    characters = prompts_of_length(lambda text: list(text.encode("ascii", "ignore")), [4 * n for n in lengths])
    return [
        (mark + bytes(text).decode())[: 4 * length]
        for mark, text, length in zip(marks, characters, lengths, strict=True)
    ]


def sharegpt(path: Path, encode: Encode | None, count: int, outputs: int | None, seed: int) -> list[Ask]:
    """The first turn of conversations out of a file in ShareGPT's format; answers as long as the file's, or `outputs`.

    Raises `PlancastError` where the file holds none.
    """
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
        pairs = [
            (item["conversations"][0]["value"], item["conversations"][1]["value"])
            for item in conversations
            if len(item.get("conversations") or item.get("conversation") or ()) >= 2
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlancastError(
            f"{path}: no file in ShareGPT's format ([{{'conversations': [{{'value': ...}}, ...]}}]): {error}"
        ) from None
    random.Random(seed).shuffle(pairs)
    length: Callable[[str], int] = (lambda text: len(encode(text))) if encode else (lambda text: len(text) // 4)
    asks: list[Ask] = []
    for prompt, answer in pairs:
        if len(asks) == count:
            break
        given, wanted = length(prompt), outputs or length(answer)
        if given >= _SHAREGPT_LEAST <= wanted and given <= _SHAREGPT_PROMPT and given + wanted <= _SHAREGPT_TOTAL:
            asks.append(Ask(prompt, wanted, given if encode else None))
    if not asks:
        raise PlancastError(
            f"{path}: none of its {len(pairs)} conversations has a prompt and an answer of usable length"
        )
    return asks


def shared_prefix(
    encode: Encode | None, count: int, *, prefixes: int, prefix: int, inputs: int, outputs: int, seed: int
) -> list[Ask]:
    """Chats that begin with one of `prefixes` common texts of `prefix` tokens, and go on with `inputs` of their own."""
    rng = random.Random(seed)
    shared: list[Any] = _prompts(encode, [prefix] * prefixes, seed)
    own = _prompts(encode, [inputs] * count, seed + 1)
    order = [number % prefixes for number in range(count)]
    rng.shuffle(order)
    asks = []
    for number, tail in zip(order, own, strict=True):
        head = shared[number]
        # Texts can be sent as a chat, with a system message; token ids only end to end.
        if encode is None:
            asks.append(Ask(tail, outputs, None, system=head))
        else:
            asks.append(Ask(head + tail, outputs, prefix + inputs))
    return asks


def trace(path: Path, encode: Encode | None, count: int | None, speed: float, seed: int) -> list[Ask]:
    """Requests at the times of a trace, played `speed` times as fast.

    JSON lines as Mooncake's (`timestamp` in milliseconds, `input_length`, `output_length`), or CSV as Azure's
    (TIMESTAMP, ContextTokens, GeneratedTokens). Raises `PlancastError` for anything else.
    """
    try:
        rows = _csv_rows(path) if path.suffix == ".csv" else _jsonl_rows(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlancastError(
            f"{path}: no trace: JSON lines with timestamp (ms), input_length and output_length, or CSV with TIMESTAMP, "
            f"ContextTokens and GeneratedTokens: {error}"
        ) from None
    rows = sorted(rows)[:count]
    if not rows:
        raise PlancastError(f"{path}: the trace is empty")
    prompts = _prompts(encode, [max(1, inputs) for _, inputs, _ in rows], seed)
    begin = rows[0][0]
    return [
        Ask(prompt, max(1, outputs), inputs if encode else None, at=(at - begin) / speed)
        for prompt, (at, inputs, outputs) in zip(prompts, rows, strict=True)
    ]


def _jsonl_rows(path: Path) -> list[tuple[float, int, int]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(line["timestamp"] / 1e3, int(line["input_length"]), int(line["output_length"])) for line in lines]


def _csv_rows(path: Path) -> list[tuple[float, int, int]]:
    def seconds(text: str) -> float:
        # Python reads microseconds; Azure writes tenths of them.
        return datetime.datetime.fromisoformat(text.strip()[:26]).timestamp()

    with path.open(encoding="utf-8", newline="") as file:
        return [
            (seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]


def poisson(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times of `count` arrivals, `rate` a second, with gamma-distributed gaps: Poisson where `burstiness` is 1."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
