"""What an operator may set, all in one place. `plancast serve` fills it from the command line and the environment."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for. A request beyond a limit is refused with 4xx that names the field and the limit."""

    max_body_bytes: int = 8 << 20
    max_prompts: int = 256  # prompts in one /v1/completions request
    max_inputs: int = 2048  # texts in one /v1/embeddings request, as OpenAI has it
    max_n: int = 32
    max_best_of: int = 32
    max_logprobs: int = 20
    max_stop: int = 16  # stop strings
    max_stop_chars: int = 512  # in one stop string


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_concurrent_requests: int = 512  # sequences in flight, waiting ones included; above: 429
    shutdown_timeout: float = 30.0
    keep_alive_interval: float = 15.0  # a comment line on a silent SSE stream
    tool_call_parser: str = "auto"  # auto | none | a name of parsers.TOOL_PARSERS
    reasoning_parser: str = "auto"  # auto | none | a name of parsers.REASONING_PARSERS
    use_generation_config: bool = True  # the artifact's generation_config.json gives the default sampling
    log_format: str = "text"  # text | json
    log_level: str = "info"
    otlp_endpoint: str | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
