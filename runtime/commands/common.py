"""What `generate` and `chat` share: loading with a word about it, default sampling, streaming, and the closing line."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from runtime.llm import LLM
from runtime.memory import format_size
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams


def say(text: str) -> None:
    """A line for the person, beside the results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def loaded(artifact: Path, engine_options: dict[str, Any], *, quiet: bool) -> Iterator[LLM]:
    """The engine, with a line on what was loaded and how long it took."""
    started = time.monotonic()
    with LLM(artifact, **engine_options) as llm:
        if not quiet:
            ready = llm.ready
            say(
                f"{llm.manifest.name}: loaded in {time.monotonic() - started:.2f} s ({ready.load_source}), "
                f"{ready.num_blocks} KV blocks in {format_size(ready.kv_cache_bytes)} ({ready.kv_cache_reason})"
            )
        yield llm


def default_params(llm: LLM, sampling: dict[str, Any], *, temperature: float) -> SamplingParams:
    """The model's own defaults, with what the command line says on top.

    `max_tokens` is None unless given. `temperature` stands where neither the model nor the command line gives one.
    """
    params = llm.default_sampling_params(**sampling)
    params.max_tokens = sampling.get("max_tokens")
    if params.beam_width:
        params.temperature = 0.0
    elif sampling.get("temperature") is None and llm.generation_config.get("temperature") is None:
        params.temperature = temperature
    return params


@contextmanager
def printed(outputs: Generator[RequestOutput]) -> Iterator[Iterator[RequestOutput]]:
    """The outputs of one stream, each printed as it comes; a line break at the end, however it ends."""
    begun = False

    def passed_on() -> Iterator[RequestOutput]:
        nonlocal begun
        for output in outputs:
            begun = True
            sys.stdout.write("".join(sequence.text for sequence in output.outputs))
            sys.stdout.flush()
            yield output

    with closing(outputs):
        try:
            yield passed_on()
        finally:
            if begun:
                print(flush=True)


class Costs:
    """What requests cost, from their outputs, whole or in deltas."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._started = time.monotonic()
        self._num_requests = 0
        self._num_tokens = 0
        self._first: list[float] = []  # seconds to the first token
        self._each: list[float] = []  # seconds a token after it
        self._most_blocks = 0

    def add(self, output: RequestOutput) -> None:
        """Count a whole result."""
        metrics = output.metrics
        lengths = [len(sequence.token_ids) for sequence in output.outputs]
        self._num_requests += 1
        self._num_tokens += sum(lengths)
        if metrics.first_token_time is not None:
            self._first.append(metrics.first_token_time - metrics.arrival_time)
            if metrics.finished_time is not None and max(lengths, default=0) > 1:
                self._each.append((metrics.finished_time - metrics.first_token_time) / (max(lengths) - 1))
        # The last token of a sequence is never stored.
        prompt_blocks, longest = len(output.prompt_token_ids) // self._block_size, len(output.prompt_token_ids) - 1
        tails = sum(-(-(longest + length) // self._block_size) - prompt_blocks for length in lengths)
        self._most_blocks = max(self._most_blocks, prompt_blocks + tails)

    def line(self, llm: LLM) -> str:
        """One line for the person."""
        seconds = time.monotonic() - self._started
        stats = llm.stats()
        parts = [f"{self._num_requests} requests"] if self._num_requests > 1 else []
        mean = "mean " if self._num_requests > 1 else ""
        if self._first:
            parts.append(f"{mean}TTFT {1000 * sum(self._first) / len(self._first):.0f} ms")
        if self._each:
            parts.append(f"{mean}TPOT {1000 * sum(self._each) / len(self._each):.1f} ms")
        parts.append(f"{self._num_tokens} tokens, {self._num_tokens / max(seconds, 1e-9):.1f} tokens/s")
        if stats.spec_decode_num_draft_tokens:
            accepted, drafted = stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens
            length = 1 + accepted / stats.spec_decode_num_drafts
            parts.append(f"drafts: {accepted} of {drafted} tokens accepted, {length:.2f} tokens a verification")
        used = max(self._most_blocks, stats.peak_used_blocks)
        parts.append(f"{used} of {stats.num_blocks} KV blocks used")
        return " | ".join(parts)
