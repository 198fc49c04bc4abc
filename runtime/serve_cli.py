"""`plancast serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from runtime.cli_options import SpeculativeConfig
from runtime.errors import PlancastError

_SERVER, _KEYS, _LIMITS, _ENGINE = "Server", "Keys and TLS", "Limits", "Engine"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def named_artifact(argument: str) -> tuple[Path, str | None]:
    """`PATH` or `NAME=PATH` as (path, name). Raises `PlancastError` where there is no such folder."""
    name, equals, rest = argument.partition("=")
    path = Path(argument)
    if equals and name and "/" not in name and not path.exists():
        path = Path(rest)
    else:
        name = ""
    if not path.is_dir():
        raise PlancastError(f"no artifact at {path}: build one with `plancast build RECIPE`")
    return path, name or None


def serve(
    artifacts: Annotated[
        list[str], typer.Argument(metavar="ARTIFACT...", help="Artifact folders, each as PATH or NAME=PATH.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to bind; 0.0.0.0 lets other machines in.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.", rich_help_panel=_SERVER)] = 8000,
    uds: Annotated[
        str | None, typer.Option(help="Listen on this Unix socket instead.", rich_help_panel=_SERVER)
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix that a proxy strips.", rich_help_panel=_SERVER)] = "",
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin that browsers may call from (repeatable).", rich_help_panel=_SERVER)
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that SIGTERM gives running requests.", rich_help_panel=_SERVER)
    ] = 30.0,
    tool_call_parser: Annotated[
        str, typer.Option(help="auto, none, hermes, llama3, mistral.", rich_help_panel=_SERVER)
    ] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help="auto, none, think.", rich_help_panel=_SERVER)] = "auto",
    generation_config: Annotated[
        bool,
        typer.Option(
            help="Take sampling defaults from the artifact's generation_config.json.", rich_help_panel=_SERVER
        ),
    ] = True,
    log_format: Annotated[str, typer.Option(help="text or json.", rich_help_panel=_SERVER)] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.", rich_help_panel=_SERVER)] = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OTLP/HTTP collector for traces, e.g. http://localhost:4318.", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must send (repeatable). Also PLANCAST_API_KEY.", rich_help_panel=_KEYS),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys, one a line.", rich_help_panel=_KEYS)] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys for loading and unloading models. Also PLANCAST_ADMIN_KEY.", rich_help_panel=_KEYS),
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="TLS certificate (PEM).", rich_help_panel=_KEYS)] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="TLS private key (PEM).", rich_help_panel=_KEYS)] = None,
    max_concurrent_requests: Annotated[
        int,
        typer.Option(min=1, help="Sequences in flight, waiting ones included; above: 429.", rich_help_panel=_LIMITS),
    ] = 512,
    queue_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a request may wait for its first step; then: 503.", rich_help_panel=_LIMITS),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, rich_help_panel=_LIMITS)] = 8 << 20,
    max_n: Annotated[int, typer.Option(min=1, help="Also for best_of.", rich_help_panel=_LIMITS)] = 32,
    max_logprobs: Annotated[int, typer.Option(min=0, rich_help_panel=_LIMITS)] = 20,
    max_stop: Annotated[int, typer.Option(min=0, help="Stop strings of one request.", rich_help_panel=_LIMITS)] = 16,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache of each model, e.g. 2GiB.", rich_help_panel=_ENGINE)
    ] = None,
    max_context_len: Annotated[int | None, typer.Option(min=1, rich_help_panel=_ENGINE)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, rich_help_panel=_ENGINE)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, rich_help_panel=_ENGINE)] = None,
    prefix_caching: Annotated[bool | None, typer.Option(rich_help_panel=_ENGINE)] = None,
    scheduling_policy: Annotated[str | None, typer.Option(help="fcfs or priority.", rich_help_panel=_ENGINE)] = None,
    num_threads: Annotated[int | None, typer.Option(min=1, rich_help_panel=_ENGINE)] = None,
    swap_cached_blocks: Annotated[
        bool | None,
        typer.Option(help="Keep evicted prefix-cache blocks in a swap file.", rich_help_panel=_ENGINE),
    ] = None,
    swap_space: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the swap file. Default: 1GiB.", rich_help_panel=_ENGINE)
    ] = None,
    engine_step_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds until a hung engine is replaced; 0: never.", rich_help_panel=_ENGINE),
    ] = 300.0,
    speculative_config: SpeculativeConfig = None,
    iteration_log: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file: a line a step, for `plancast trace`. Of several models, each has FILE-ARTIFACT.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
) -> None:
    """Serve artifacts over HTTP: OpenAI's, TGI's and Anthropic's protocols, and a live page at /."""
    from runtime.memory import parse_size
    from runtime.server import auth, parsers
    from runtime.server.config import RequestLimits, ServerConfig
    from runtime.server.run import serve as run_server

    parsers.check_choice(tool_call_parser, parsers.TOOL_PARSERS, "--tool-call-parser")
    parsers.check_choice(reasoning_parser, parsers.REASONING_PARSERS, "--reasoning-parser")
    for option, value, allowed in (
        ("--log-format", log_format, ("text", "json")),
        ("--log-level", log_level, ("debug", "info", "warning", "error")),
    ):
        if value not in allowed:
            raise PlancastError(f"{option} is {value!r}: choose one of {', '.join(allowed)}")
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise PlancastError("TLS needs both --ssl-certfile and --ssl-keyfile")
    for file in filter(None, (ssl_certfile, ssl_keyfile)):
        if not Path(file).is_file():
            raise PlancastError(f"no such file: {file}")
    if iteration_log is not None and not iteration_log.absolute().parent.is_dir():
        raise PlancastError(f"--iteration-log {iteration_log}: there is no folder {iteration_log.absolute().parent}")
    named = [named_artifact(argument) for argument in artifacts]
    config = ServerConfig(
        host=host,
        port=port,
        uds=uds,
        root_path=root_path,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        api_keys=auth.load_keys(api_key or (), api_key_file, os.environ, auth.ENV_KEYS),
        admin_keys=auth.load_keys((), admin_key_file, os.environ, auth.ENV_ADMIN_KEYS),
        cors_origins=tuple(cors_origin or ()),
        max_concurrent_requests=max_concurrent_requests,
        shutdown_timeout=shutdown_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        use_generation_config=generation_config,
        log_format=log_format,
        log_level=log_level,
        otlp_endpoint=otlp_endpoint,
        limits=RequestLimits(
            max_body_bytes=max_body_bytes,
            max_n=max_n,
            max_best_of=max_n,
            max_logprobs=max_logprobs,
            max_stop=max_stop,
        ),
    )
    engine_options = {
        "num_threads": num_threads,
        "speculative_config": speculative_config,
        "kv_cache_memory": kv_cache_memory,
        "max_context_len": max_context_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": prefix_caching,
        "scheduling_policy": scheduling_policy,
        "queue_timeout": queue_timeout,
        "swap_cached_blocks": swap_cached_blocks,
        "swap_space": None if swap_space is None else parse_size(swap_space),
        "engine_step_timeout": engine_step_timeout,
        "max_logprobs": max_logprobs,
    }
    run_server(config, named, engine_options, iteration_log)
