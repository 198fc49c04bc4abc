"""The artifact's manifest: every fact about an engine, typed, and its encoding, which tells when a byte was changed.

`runtime/artifact.py` opens and checks an artifact, `runtime/artifact_writer.py` writes one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec

from runtime.errors import ArtifactError
from runtime.kv_layout import KvLayout
from runtime.speculation.config import SpeculationConfig

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
Pooling = Literal["last", "mean", "cls"]
REBUILD = "rebuild it: plancast build {recipe} --force"

_NO_DIGEST = "0" * 64


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
    # File names of the compiled form, where there is one: a plan of ours, or of what OpenVINO must run, its blob.
    plan: str | None = None
    blob: str | None = None
    plugins: dict[str, int] = {}  # our operators that the backend put in itself -> version

    @property
    def summary(self) -> str:
        """What there is to load, in a few words for people."""
        if built := self.properties.get("compute_capabilities"):
            return f", for {built.replace(' ', ', ')}"
        if self.name == "openvino":
            return ", compiled form kept" if self.plan or self.blob else ", portable form only"
        return ""


class HardwareInfo(msgspec.Struct, kw_only=True):
    """The machine that a compiled form fits. `isa` holds the CPU features that a blob was compiled for."""

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
    speculation: SpeculationConfig = SpeculationConfig()


class Parity(msgspec.Struct, kw_only=True):
    """The engine against the Hugging Face model in f32, on the prompts and the text that ship with the builder."""

    greedy_prompts: int
    greedy_tokens: int
    greedy_matching_prompts: int  # identical to the last token
    greedy_matching_tokens: int = 0  # up to the first difference of each prompt
    positions: int = 0  # of the text, over which the figures below are
    mean_kl: float
    p99_kl: float
    top1_agreement: float  # share of positions
    perplexity: float
    reference_perplexity: float


class EmbeddingParity(msgspec.Struct, kw_only=True):
    """An embedding engine against the Hugging Face model in f32: pooled prompts, and each token of the text."""

    prompts: int
    min_cosine: float  # between the two vectors of a prompt
    mean_cosine: float
    positions: int
    hidden_min_cosine: float  # between the two hidden states of a token
    hidden_mean_cosine: float


class EmbeddingInfo(msgspec.Struct, kw_only=True):
    """What an engine whose output is the last hidden state makes of it: one vector a prompt."""

    size: int  # of the vector
    pooling: Pooling
    normalize: bool
    parity: EmbeddingParity | None = None


class DraftHeadInfo(msgspec.Struct, kw_only=True):
    """A second engine in the artifact: an EAGLE-style head, which drafts from the target's last hidden states."""

    name: str
    backend: BackendInfo  # of the head's own engine
    kv: KvLayout
    plugins: dict[str, int] = {}  # operator -> version
    vocabulary: str  # file name of {"target_ids": [...]}: the target's id of each token that the head drafts
    accepted_by_position: list[float] = []  # of greedy drafts on held-out text, as trained


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
    embedding: EmbeddingInfo | None = None  # None: the engine's output is logits
    draft_head: DraftHeadInfo | None = None  # not None: the engine has a second output, the rows' hidden states
    files: dict[str, FileInfo] = {}
    build_key: str = ""  # names everything that the engine was made from, for the build cache
    digest: str = _NO_DIGEST  # SHA-256 of these very bytes, this field being zeros


def rebuild_hint(recipe: str | None = None) -> str:
    """What to do about an artifact that cannot be used."""
    return REBUILD.format(recipe=recipe or "RECIPE")


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. They hold their own SHA-256, so that any changed byte shows."""
    blank = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, digest=_NO_DIGEST)), indent=2)
    digest = hashlib.sha256(blank).hexdigest()
    # The digest is the last field: the last run of zeros that long is its own.
    head, _, tail = blank.rpartition(_NO_DIGEST.encode())
    return head + digest.encode() + tail


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`.

    Raises:
        ArtifactError: cut short, changed since it was written, or of another format version. Says what to do.
    """
    raw = _parse(data)
    name = raw.get("name")
    hint = rebuild_hint(name if isinstance(name, str) else None)
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{MANIFEST_NAME}: format version {version!r}, and this plancast reads version {FORMAT_VERSION}; {hint}"
        )
    digest = raw.get("digest")
    head, found, tail = data.rpartition(digest.encode()) if isinstance(digest, str) and digest else (b"", b"", b"")
    if not found or hashlib.sha256(head + _NO_DIGEST.encode() + tail).hexdigest() != digest:
        raise ArtifactError(f"{MANIFEST_NAME}: changed since it was written; {hint}")
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{MANIFEST_NAME}: {error}; {hint}") from None


def _parse(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{MANIFEST_NAME}: not valid JSON, so cut short or damaged ({error}); {rebuild_hint()}"
        ) from None
    if not isinstance(raw, dict):
        raise ArtifactError(f"{MANIFEST_NAME}: holds no JSON object; {rebuild_hint()}")
    return raw
