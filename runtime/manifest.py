"""The artifact's manifest: every fact about an engine, typed. `runtime/artifact.py` reads, checks and writes it."""

from __future__ import annotations

import msgspec

from runtime.kv_layout import KvLayout

FORMAT_VERSION = 1


class ModelInfo(msgspec.Struct, kw_only=True):
    """Where the model came from and what it is."""

    name: str
    architecture: str  # e.g. LlamaForCausalLM
    family: str  # e.g. llama
    source: str  # hub:owner/name | folder | gguf | package:name==version
    revision: str | None = None
    sha256: str | None = None  # of the source weights
    license: str | None = None
    context_length: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_parameters: int
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    pad_token_id: int | None = None


class BackendInfo(msgspec.Struct, kw_only=True):
    """What compiled the engine, and with which properties, all explicit."""

    name: str  # openvino
    version: str
    device: str = "CPU"
    properties: dict[str, str] = {}
    engine: str  # file name of the portable form (IR)
    blob: str | None = None  # file name of the compiled form, where there is one


class HardwareInfo(msgspec.Struct, kw_only=True):
    """The machine that a compiled form fits. `isa` holds the CPU features that it was compiled for."""

    machine: str  # x86_64
    isa: list[str] = []


class Limits(msgspec.Struct, kw_only=True):
    """The recipe's limits. The runtime may lower them, never raise max_context_len."""

    max_context_len: int  # tokens, prompt and output together
    max_num_seqs: int
    max_num_batched_tokens: int


class RuntimeDefaults(msgspec.Struct, kw_only=True):
    """What a recipe sets for serving, overridable on the command line."""

    kv_cache_memory: int | None = None  # bytes; None: a share of free memory
    kv_cache_memory_share: float = 0.4
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # fcfs | priority
    num_threads: int | None = None  # None: the machine's cores
    ttft_slo: float | None = None  # seconds
    tpot_slo: float | None = None  # seconds


class Parity(msgspec.Struct, kw_only=True):
    """The engine against the Hugging Face model in f32, on the prompts and the text that ship with the builder."""

    greedy_prompts: int
    greedy_tokens: int
    greedy_matching_prompts: int  # identical to the last token
    mean_kl: float
    p99_kl: float
    top1_agreement: float  # share of positions
    perplexity: float
    reference_perplexity: float


class FileInfo(msgspec.Struct):
    sha256: str
    bytes: int


class Manifest(msgspec.Struct, kw_only=True):
    """manifest.json."""

    format_version: int = FORMAT_VERSION
    name: str
    created: str  # UTC, ISO 8601
    plancast_version: str
    recipe: dict  # the resolved recipe
    recipe_hash: str
    model: ModelInfo
    backend: BackendInfo
    hardware: HardwareInfo
    plugins: dict[str, int]  # operator -> version
    kv: KvLayout
    limits: Limits
    defaults: RuntimeDefaults
    weights_bytes: dict[str, int]  # by kind: int8, bf16, scale, ...
    operators: dict[str, int]  # by type, after fusion
    operators_traced: dict[str, int]  # by type, as traced
    build: dict  # seconds by stage, peak memory in bytes
    parity: Parity | None = None
    files: dict[str, FileInfo] = {}
