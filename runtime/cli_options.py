"""Command-line options that several commands share: how to sample, and how to run the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SAMPLING, _ENGINE = "Sampling", "Engine"


def _sampling(*names: str, help: str, **settings):
    return typer.Option(*names, help=help, rich_help_panel=_SAMPLING, **settings)


def _engine(*names: str, help: str, **settings):
    return typer.Option(*names, help=help, rich_help_panel=_ENGINE, **settings)


ArtifactFolder = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The artifact's folder.")]

MaxTokens = Annotated[int | None, _sampling(help="Tokens to generate at most. Default: to the end of the context.")]
Temperature = Annotated[float | None, _sampling(help="0: always the likeliest token.")]
TopP = Annotated[float | None, _sampling(help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, _sampling(help="Sample from this many likeliest tokens; 0: all.")]
MinP = Annotated[float | None, _sampling(help="Drop tokens less likely than this share of the likeliest one.")]
TypicalP = Annotated[float | None, _sampling(help="Sample from the most typical tokens of this total probability.")]
RepetitionPenalty = Annotated[float | None, _sampling(help="Above 1: discourage tokens that were there already.")]
PresencePenalty = Annotated[float | None, _sampling(help="From -2 to 2: discourage tokens that were generated.")]
FrequencyPenalty = Annotated[float | None, _sampling(help="From -2 to 2: the same, by how often they were.")]
Seed = Annotated[int | None, _sampling(help="The same seed, the same text.")]
Stop = Annotated[list[str] | None, _sampling(help="End before this text (repeatable).")]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", help="Go on after the end-of-text token.")]

NumThreads = Annotated[int | None, _engine(min=1, help="Default: the machine's cores.")]
KvCacheMemory = Annotated[
    str | None, _engine(metavar="SIZE", help="Memory for the KV cache, e.g. 1GiB. Default: a share of what is free.")
]
MaxContextLen = Annotated[int | None, _engine(min=1, help="Tokens of prompt and output together, at most.")]
MaxNumSeqs = Annotated[int | None, _engine(min=1, help="Sequences to run side by side, at most.")]
MaxNumBatchedTokens = Annotated[int | None, _engine(min=1, help="Tokens of one step, at most.")]
PrefixCaching = Annotated[bool | None, _engine(help="Reuse what several prompts begin with.")]
SchedulingPolicy = Annotated[str | None, _engine(metavar="fcfs|priority", help="Who runs first.")]
SpeculativeConfig = Annotated[
    str | None,
    _engine(
        metavar="JSON",
        help='How to draft tokens: \'{"method": "ngram", "num_speculative_tokens": 5}\', or a method alone: ngram, '
        "suffix, off. Default: as the recipe says.",
    ),
]
IterationLogFile = Annotated[Path | None, _engine(metavar="FILE", help="Write a line a step (JSONL; plancast trace).")]
SeparateProcess = Annotated[
    bool, _engine("--separate-process", help="Run the engine in a process of its own, which is replaced if it dies.")
]
VerifyFiles = Annotated[bool, _engine("--verify", help="Check every file's SHA-256 first.")]
