"""`plancast generate` and `plancast chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime import cli_options as opt


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)
    app.command("chat")(chat)


def generate(
    artifact: opt.ArtifactFolder,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Left out: standard input is the prompt.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompts are messages to the assistant.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message, with --chat.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='One request a line: {"prompt" | "messages" | "prompt_token_ids": ..., "params": {...}, "id": ...}.',
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write the results there, one a line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a result.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the results.")] = False,
    n: Annotated[
        int, typer.Option("-n", "--n", min=1, help="Sequences for each prompt.", rich_help_panel="Sampling")
    ] = 1,
    beam_width: Annotated[
        int, typer.Option(min=0, help="Beam search with so many beams.", rich_help_panel="Sampling")
    ] = 0,
    logprobs: Annotated[
        int | None, typer.Option(help="Log probabilities of so many tokens (--json).", rich_help_panel="Sampling")
    ] = None,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    num_threads: opt.NumThreads = None,
    kv_cache_memory: opt.KvCacheMemory = None,
    max_context_len: opt.MaxContextLen = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_caching: opt.PrefixCaching = None,
    scheduling_policy: opt.SchedulingPolicy = None,
    speculative_config: opt.SpeculativeConfig = None,
    iteration_log: opt.IterationLogFile = None,
    separate_process: opt.SeparateProcess = False,
    verify: opt.VerifyFiles = False,
) -> None:
    """Complete prompts. One prompt streams to the terminal; several run in one batch.

    What it cost (time to first token, time per output token, tokens/s, KV blocks) comes last, on standard error.
    """
    from runtime.commands.generate import GenerateCommand

    command = GenerateCommand(
        artifact=artifact,
        engine_options=_engine_options(
            num_threads=num_threads,
            kv_cache_memory=kv_cache_memory,
            max_context_len=max_context_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=prefix_caching,
            scheduling_policy=scheduling_policy,
            speculative_config=speculative_config,
            iteration_log=iteration_log,
            separate_process=separate_process,
            verify=verify,
        ),
        sampling={
            "n": n if n > 1 else None,
            "beam_width": beam_width or None,
            "logprobs": logprobs,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "typical_p": typical_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "stop": stop,
            "ignore_eos": ignore_eos or None,
        },
        prompts=prompts or [],
        chat=chat,
        system=system,
        input=input,
        output=output,
        as_json=as_json,
        quiet=quiet,
    )
    with _interruptible():
        command.run()


def chat(
    artifact: opt.ArtifactFolder,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the answers.")] = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    num_threads: opt.NumThreads = None,
    kv_cache_memory: opt.KvCacheMemory = None,
    max_context_len: opt.MaxContextLen = None,
    speculative_config: opt.SpeculativeConfig = None,
    iteration_log: opt.IterationLogFile = None,
    separate_process: opt.SeparateProcess = False,
    verify: opt.VerifyFiles = False,
) -> None:
    """Talk with the model. /reset forgets, /quit leaves, Ctrl-C stops an answer; the history is kept."""
    from runtime.commands.chat import ChatCommand

    command = ChatCommand(
        artifact=artifact,
        engine_options=_engine_options(
            num_threads=num_threads,
            kv_cache_memory=kv_cache_memory,
            max_context_len=max_context_len,
            speculative_config=speculative_config,
            iteration_log=iteration_log,
            separate_process=separate_process,
            verify=verify,
        ),
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "typical_p": typical_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": stop,
        },
        system=system,
        quiet=quiet,
    )
    with _interruptible():
        command.run()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with a word; typer would end it with none."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def _engine_options(
    *, separate_process: bool, verify: bool, iteration_log: Path | None, **options: Any
) -> dict[str, Any]:
    options["in_process"] = not separate_process
    options["verify"] = "full" if verify else "quick"
    options["iteration_log"] = None if iteration_log is None else str(iteration_log)
    return options
