"""A recipe: one YAML file that says everything about one engine, as strict typed structs.

`load_recipe` reads a file (with `extends` and `--set` overrides) into a `Recipe`; what it accepts is exactly what these
structs say. `recipe_to_dict` and `recipe_from_dict` are the form in which the manifest carries it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from runtime.errors import RecipeError
from runtime.manifest import Pooling
from runtime.speculation.config import SpeculationConfig

BackendName = Literal["openvino", "torch", "tensorrt", "tensorrt_rtx"]
ComputeCapability = Literal["SM75", "SM80", "SM86", "SM89", "SM90", "SM100", "SM120", "SM121"]
ComputeDtype = Literal["f32", "bf16", "f16"]
# `checkpoint`: as the checkpoint stores them, where it is quantized already (GPTQ, AWQ, compressed-tensors, GGUF).
WeightDtype = Literal["f32", "f16", "bf16", "int8", "int4", "fp8", "checkpoint"]
GroupSize = Literal[32, 64, 128, "channel"]
# awq+gptq: AWQ's scales first, then GPTQ on the scaled weights.
QuantMethod = Literal["rtn", "gptq", "awq", "awq+gptq"]
KvDtype = Literal["f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"]
SchedulingPolicy = Literal["fcfs", "priority"]
Task = Literal["generate", "embed"]

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
# Bytes: an integer, or text such as 512MB or 1GiB, which the loader turns into one.
Size = Annotated[int, Meta(ge=1, le=2**50, extra={"size": True})]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BackendConfig(_Section, frozen=True):
    """What compiles the engine and for which device. Nothing is left to a vendor's default."""

    name: BackendName = "openvino"
    device: Literal["CPU", "CUDA"] = "CPU"
    compute: ComputeDtype = "f32"
    # Tokens' activations quantized to int8 in groups of so many channels (our kernels': 32); 0: not, or to 12-15 bits;
    # None: as `builder.machine_choices` says.
    dynamic_quantization_group_size: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    # What multiplies by int8 weights: our C++ kernels, where they are built, or OpenVINO's own.
    linear: Literal["native", "openvino"] = "native"
    # What attends over the KV cache, in the same way.
    attention: Literal["native", "openvino"] = "native"
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None  # None: the machine's cores
    blob: bool = True  # keep the compiled form too, a plan or a blob, for a fast load
    # The GPU architectures that engines and kernels are built for. tensorrt_rtx: a list; (): SM86, SM89, SM120.
    # tensorrt: one, that of the GPU in the machine that builds.
    compute_capabilities: tuple[ComputeCapability, ...] = ()
    # tensorrt and tensorrt_rtx: leave the weights out of the engines; `plancast refit` puts them in from the model.
    strip_weights: bool = False
    # tensorrt: weights may stay in host memory and come over as they are needed, where the device's is too small.
    weight_streaming: bool = False


class WeightOverride(_Section, frozen=True):
    """Another scheme for the weights whose name `match` (a shell pattern) matches; None: as for all."""

    match: Annotated[str, Meta(min_length=1)]
    dtype: WeightDtype | None = None
    group_size: GroupSize | None = None
    symmetric: bool | None = None


class MixedConfig(_Section, frozen=True):
    """Mixed precision: the weights that suffer most from 4 bits get 8, until one bound holds. None: not mixed."""

    max_kl: Annotated[float, Meta(gt=0)] | None = None  # nats a position on the calibration text, mean
    max_bits: Annotated[float, Meta(ge=4, le=16)] | None = None  # bits a quantized weight on average, scales included


class CalibrationConfig(_Section, frozen=True):
    """What the calibrated methods read. `text`: a file of yours; None: the text that ships with the builder."""

    text: str | None = None
    samples: Annotated[int, Meta(ge=1, le=4096)] = 32
    tokens: Annotated[int, Meta(ge=8, le=32768)] = 512  # of each sample


class WeightsConfig(_Section, frozen=True):
    """How weights are stored. `skip`: shell patterns of weight names that stay f32.

    Head and embedding of an int4 model are int8 unless an override names them.
    """

    dtype: WeightDtype = "f32"
    group_size: GroupSize | None = None  # inputs that share a scale; None: 32 for int4, channel for int8 and fp8
    symmetric: bool | None = None  # None: true but for int4
    method: QuantMethod = "rtn"
    damping: Annotated[float, Meta(gt=0, le=1)] = 0.01  # GPTQ: of the Hessian's mean diagonal
    smooth: Annotated[float, Meta(ge=0, le=1)] | None = None  # SmoothQuant's alpha, for int8 activations
    overrides: tuple[WeightOverride, ...] = ()
    skip: tuple[str, ...] = ()
    mixed: MixedConfig = MixedConfig()
    calibration: CalibrationConfig = CalibrationConfig()


class KvConfig(_Section, frozen=True):
    """How the KV cache is stored; `block_size` in tokens."""

    key: KvDtype = "f32"
    value: KvDtype = "f32"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 32
    group_size: Literal[32, 64] = 32  # int4: elements of a head that share a scale
    # fp8: a scale a token and head, or one a layer, calibrated as `weights.calibration` says, that takes no memory.
    scales: Literal["dynamic", "static"] = "dynamic"
    # Walsh-Hadamard transform before storing: spreads outliers, which int4 keys need.
    rotate: Literal["none", "key", "value", "both"] = "none"
    skip_layers: tuple[Annotated[int, Meta(ge=0, le=2**16)], ...] = ()  # that keep 16 bits


class LimitsConfig(_Section, frozen=True):
    """What the engine must be able to hold: tokens a sequence, sequences a step, tokens a step."""

    max_context_len: Annotated[int, Meta(ge=1, le=2**24)] = 2048
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 512


class RuntimeConfig(_Section, frozen=True):
    """Defaults for serving; the command line overrides them."""

    kv_cache_memory: Size | None = None  # bytes; None: `kv_cache_memory_share` of free memory
    kv_cache_memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.4
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    ttft_slo: Seconds | None = None
    tpot_slo: Seconds | None = None


class EmbeddingConfig(_Section, frozen=True):
    """With `task: embed`: how the last hidden states of a text become its one vector."""

    pooling: Pooling = "last"  # the last token's, the mean of all tokens', the first token's
    normalize: bool = True  # to length 1


class QualityConfig(_Section, frozen=True):
    """Bounds on the parity figures; a build that breaks one fails. None: no bound."""

    max_kl: Annotated[float, Meta(gt=0)] | None = None  # nats a position, mean
    min_top1: Annotated[float, Meta(gt=0, le=1)] | None = None  # share of positions
    max_perplexity_ratio: Annotated[float, Meta(ge=1)] | None = None  # engine / reference
    min_cosine: Annotated[float, Meta(gt=0, le=1)] | None = None  # of embeddings, the worst prompt's


class ParityConfig(_Section, frozen=True):
    """The comparison with the Hugging Face model that each build makes."""

    enabled: bool = True
    prompts: Annotated[int, Meta(ge=1, le=1000)] = 12
    new_tokens: Annotated[int, Meta(ge=1, le=4096)] = 32


class Recipe(_Section, frozen=True):
    """One engine. `model` is a zoo card's name, hub:owner/name[@revision], gguf:/path, or a folder path."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    model: Annotated[str, Meta(min_length=1)]
    trust_remote_code: bool = False
    task: Task = "generate"  # embed: the output is the last hidden state, and the model's head is left out
    embedding: EmbeddingConfig = EmbeddingConfig()
    # An EAGLE-style head to build into the artifact, for `speculation: eagle`: a shipped one's name, or a folder that
    # `plancast draft train --kind head` made.
    draft_head: Annotated[str, Meta(min_length=1)] | None = None
    backend: BackendConfig = BackendConfig()
    weights: WeightsConfig = WeightsConfig()
    kv: KvConfig = KvConfig()
    limits: LimitsConfig = LimitsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    quality: QualityConfig = QualityConfig()
    parity: ParityConfig = ParityConfig()


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain values, every default written out."""
    return msgspec.json.decode(msgspec.json.encode(recipe))  # tuples become lists, as in the manifest


def recipe_from_dict(value: dict[str, Any]) -> Recipe:
    """The inverse of `recipe_to_dict`. Raises `RecipeError` where `value` is no recipe of this version."""
    try:
        return msgspec.convert(value, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"not a recipe that this version understands: {error}") from None


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 (hex) over the resolved content: equal recipes hash equally however they were written."""
    canonical = json.dumps(recipe_to_dict(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Load a shipped recipe by name, or a file by path, with overrides `key.path=value` (as `--set` takes them).

    Raises `RecipeError` that lists every problem found: file and line, key, value, what is allowed, the nearest match.
    """
    from builder.recipe_load import load

    return load(str(name_or_path), overrides or [])
