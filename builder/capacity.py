"""How many requests a model leaves room for: `plancast plan`. From a config.json alone; no weights are needed.

    weights + requests * tokens * (KV bytes a token) <= memory * share

Without paging a request reserves its whole context for as long as it lives. With paging it holds the blocks of the
tokens that it has so far (PagedAttention, https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.paged_attention.kv_formats import KvFormat
from runtime.errors import BuildError, ZooError
from runtime.kv_layout import KvLayer, KvLayout

# Bits that a weight takes, scales included: one f16 scale a group of 32 for int4, one a channel for int8 and fp8.
WEIGHT_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 4.5}
KV_FORMATS = ("f32", "f16", "int8", "fp8_e4m3", "int4")
KV_ALIASES = {"bf16": "f16", "fp8": "fp8_e4m3", "fp16": "f16", "fp8_e5m2": "fp8_e4m3", "float16": "f16"}
_TEXT_WITHOUT_KV = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "ssm"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan needs to know of a model: sizes in elements. `kv_heads` and head sizes by layer that attends."""

    name: str
    parameters: int
    embedding_parameters: int  # of the embedding and the head: quantized to no less than 8 bits
    layers: tuple[tuple[int, int, int], ...]  # (KV heads, key head size, value head size)
    context_length: int | None


@dataclass(frozen=True, slots=True)
class Fit:
    """One KV format: bytes a token and a full sequence, and the requests that run side by side."""

    kv: str
    bytes_per_token: int
    bytes_per_sequence: int
    reserved: int  # without paging
    paged_full: int  # with paging, each request as long as the context
    paged_mean: int  # with paging, requests of the mean length


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer: bytes of the memory that weights take, what is left for KV, and a `Fit` a format."""

    shape: ModelShape
    memory: int
    usable: int
    weights: str
    weight_bytes: int
    context: int
    mean_tokens: int
    block_size: int
    fits: tuple[Fit, ...]

    @property
    def kv_memory(self) -> int:
        return max(0, self.usable - self.weight_bytes)


def read_shape(config: dict[str, Any], name: str) -> ModelShape:
    """The shape of the model that `config` (of config.json) describes; parameters are counted by building it, empty.

    Raises:
        BuildError: a size is missing or senseless, or transformers cannot make such a model.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    where = f"{name}: config.json"
    layers = _size(text, where, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _size(text, where, "num_attention_heads", "n_head", "n_heads")
    hidden = _size(text, where, "hidden_size", "n_embd", "d_model")
    kv_heads = _optional(text, where, "num_key_value_heads", "num_kv_heads", "n_head_kv") or (
        1 if text.get("multi_query") else heads
    )
    if text.get("kv_lora_rank"):  # MLA: cached as it is attended, expanded to every head
        kv_heads = heads
        key_size = _size(text, where, "qk_nope_head_dim") + _size(text, where, "qk_rope_head_dim")
        value_size = _size(text, where, "v_head_dim")
    else:
        key_size = value_size = _optional(text, where, "head_dim", "head_size") or hidden // heads
    kinds = text.get("layer_types")
    attending = layers
    if isinstance(kinds, list) and len(kinds) == layers:
        attending = sum(kind not in _TEXT_WITHOUT_KV for kind in kinds)
    vocab = _size(text, where, "vocab_size")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    context = next(
        (text[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len") if text.get(key)), None
    )
    return ModelShape(
        name=name,
        parameters=_count_parameters(config, name),
        embedding_parameters=vocab * hidden * (1 if tied else 2),
        layers=((kv_heads, key_size, value_size),) * attending,
        context_length=context if isinstance(context, int) else None,
    )


def kv_bytes_per_token(shape: ModelShape, kv: str) -> int:
    """Bytes of keys and values of one token in all layers, scales included."""
    return _layout(shape, kv, 1).bytes_per_token


def plan_capacity(
    shape: ModelShape,
    *,
    memory: int,
    context: int,
    weights: str = "bf16",
    share: float = 0.9,
    mean_tokens: int | None = None,
    block_size: int = 16,
    formats: tuple[str, ...] = KV_FORMATS,
) -> Capacity:
    """What fits into `memory` bytes, of which `share` may be taken (the rest is for activations and the system).

    Args:
        context: tokens that a request may take, prompt and answer.
        mean_tokens: tokens that a request holds on average over its life; half of `context` unless given.
    """
    mean = min(mean_tokens or max(1, context // 2), context)
    usable = int(memory * share)
    nbytes = weight_bytes(shape, weights)
    left = max(0, usable - nbytes)
    fits = []
    for kv in formats:
        layout = _layout(shape, kv, block_size)
        token = layout.bytes_per_token
        blocks = left // layout.bytes_per_block if token else 0
        fits.append(
            Fit(
                kv=kv,
                bytes_per_token=token,
                bytes_per_sequence=token * context,
                reserved=left // (token * context) if token else 0,
                paged_full=blocks // -(-context // block_size),
                paged_mean=blocks // -(-mean // block_size),
            )
        )
    return Capacity(shape, memory, usable, weights, nbytes, context, mean, block_size, tuple(fits))


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """Bytes of the stored weights; an int4 model keeps embedding and head at int8."""
    embeddings = min(shape.embedding_parameters, shape.parameters)
    body = shape.parameters - embeddings
    kept = max(WEIGHT_BITS[weights], 8.0) if weights == "int4" else WEIGHT_BITS[weights]
    return math.ceil((body * WEIGHT_BITS[weights] + embeddings * kept) / 8)


def load_config(model: str) -> tuple[str, dict[str, Any]]:
    """`(name, config)` of a config.json, a folder that holds one, a zoo card that was pulled, or hub:owner/name.

    Of a hub's repository only config.json is fetched. Raises `PlancastError` where there is none.
    """
    from zoo.checkpoint import read_config
    from zoo.models import parse_model, recorded

    path = Path(model).expanduser()
    if path.suffix == ".json":
        return path.parent.resolve().name if path.name == "config.json" else path.stem, read_config(path)
    target = parse_model(model)
    if target.folder is not None:
        return target.name, read_config(target.folder / "config.json")
    if target.gguf is not None:
        raise BuildError(f"{model}: a GGUF file has no config.json; name the folder of the original model")
    if (checkpoint := recorded(target, False)) is not None:
        return target.name, checkpoint.config
    from zoo.card import HubSource
    from zoo.sources.hub import fetch_config

    reasons = []
    for source in target.sources:
        if isinstance(source, HubSource):
            try:
                return target.name, read_config(fetch_config(source))
            except ZooError as error:
                reasons.append(str(error))
    because = f" and cannot be fetched ({'; '.join(reasons)})" if reasons else ""
    raise BuildError(
        f"{target.name}: its config.json is not on this machine{because}; pull it first: plancast zoo pull {model}"
    )


def describe(capacity: Capacity) -> dict[str, Any]:
    """The plan as plain values, for `--json`."""
    import dataclasses

    value = dataclasses.asdict(capacity)
    value["kv_memory"] = capacity.kv_memory
    value["shape"]["layers"] = len(capacity.shape.layers)
    return json.loads(json.dumps(value))


def _layout(shape: ModelShape, kv: str, block_size: int) -> KvLayout:
    layers = tuple(
        KvLayer(
            num_kv_heads=heads,
            key_head_size=key,
            value_head_size=value,
            key_dtype=kv,
            value_dtype=kv,
            key_scale_bytes=KvFormat(kv).scale_bytes(key),
            value_scale_bytes=KvFormat(kv).scale_bytes(value),
        )
        for heads, key, value in shape.layers
    )
    return KvLayout(block_size=block_size, layers=layers)


def _count_parameters(config: dict[str, Any], name: str) -> int:
    import accelerate
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of what a bare config lacks and nobody needs here
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    kind = plain.pop("model_type", None)
    try:
        parsed = AutoConfig.for_model(kind, **plain)
        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(parsed)
    except Exception as error:  # a config may be wrong in any way, and transformers raises as many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise BuildError(
            f"{name}: no causal language model can be made of its config.json ({kind!r}): {reason}"
        ) from None
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _size(config: dict[str, Any], where: str, *names: str) -> int:
    value = _optional(config, where, *names)
    if value is None:
        raise BuildError(f"{where} has no {names[0]}, so it is no decoder's config")
    return value


def _optional(config: dict[str, Any], where: str, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BuildError(f"{where}: {name} is {value!r}; a positive integer is expected")
        return value
    return None
