"""Combinations of keys that no engine can honour, each with the reason. Keys are checked one by one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from builder.recipe import EmbeddingConfig, Recipe
from plugins.gpu.architectures import RTX_CAPABILITIES

# OpenVINO's paged attention on x86 by compute dtype: the KV dtypes whose values are stored as asked for (measured on
# 2026.4.1). It refuses f32 + bf16 and bf16 + f32 when the model runs, and turns bf16 + f16 into bf16 in silence.
_OPENVINO_KV = {"f32": ("f32", "f16", "int8"), "bf16": ("bf16", "int8")}
_OPENVINO_BLOCK_SIZE = 32  # and of our kernels
# Keys of the section `backend` that some backends alone heed.
_ONLY_OF = {
    "compute_capabilities": ("tensorrt", "tensorrt_rtx"),
    "strip_weights": ("tensorrt", "tensorrt_rtx"),
    "weight_streaming": ("tensorrt",),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A key that cannot stand beside the others."""

    path: tuple[str, ...]
    text: str


def impossible(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is impossible in `recipe`; nothing where it can be built."""
    if recipe.backend.name == "openvino":
        yield from _openvino(recipe)
    elif recipe.backend.name == "torch":
        yield from _torch(recipe)
    else:
        yield from _tensorrt(recipe)
    for key, backends in _ONLY_OF.items():
        if getattr(recipe.backend, key) and recipe.backend.name not in backends:
            yield Problem(
                ("backend", key),
                f"has no effect on {recipe.backend.name}; remove it, or set backend.name: {' or '.join(backends)}",
            )
    yield from _weights(recipe)
    yield from _kv(recipe)
    yield from _limits(recipe)
    yield from _embedding(recipe)
    yield from _draft_head(recipe)
    yield from _quality(recipe)


def _draft_head(recipe: Recipe) -> Iterator[Problem]:
    if recipe.draft_head is None:
        if "eagle" in recipe.speculation.method:
            yield Problem(
                ("speculation", "method"),
                "eagle drafts with the head that draft_head names, and there is none; set draft_head",
            )
        return
    if recipe.backend.name != "openvino":
        yield Problem(("draft_head",), f"is impossible on {recipe.backend.name}; allowed with backend.name: openvino")
    if recipe.task != "generate":
        yield Problem(("draft_head",), f"has nothing to draft with task: {recipe.task}; remove it")


def _torch(recipe: Recipe) -> Iterator[Problem]:
    group = recipe.backend.dynamic_quantization_group_size
    if group:
        yield Problem(
            ("backend", "dynamic_quantization_group_size"),
            f"{group} is impossible on torch, which quantizes no activations; set it to 0",
        )


def _tensorrt(recipe: Recipe) -> Iterator[Problem]:
    """TensorRT and TensorRT-RTX: networks are strongly typed, and both read the same quantized weights."""
    backend, weights, kv, name = recipe.backend, recipe.weights, recipe.kv, recipe.backend.name
    if backend.device != "CUDA":
        yield Problem(("backend", "device"), f"{backend.device} is impossible on {name}; set it to CUDA")
    if backend.compute != "f16":
        yield Problem(("backend", "compute"), f"{backend.compute} is not what {name} computes in; set it to f16")
    if backend.dynamic_quantization_group_size:
        text = f"{backend.dynamic_quantization_group_size} is impossible on {name}; set it to 0"
        yield Problem(("backend", "dynamic_quantization_group_size"), text)
    capabilities = ("backend", "compute_capabilities")
    if name == "tensorrt" and len(backend.compute_capabilities) != 1:
        yield Problem(
            capabilities,
            f"{', '.join(backend.compute_capabilities) or 'nothing'} is not what a tensorrt engine is for: the one "
            "GPU that builds it; name that, such as [SM90]",
        )
    unknown = sorted({*backend.compute_capabilities} - {*RTX_CAPABILITIES})
    if name == "tensorrt_rtx" and unknown:
        yield Problem(
            capabilities,
            f"{', '.join(unknown)} is not what tensorrt_rtx builds for; allowed: {', '.join(RTX_CAPABILITIES)}",
        )
    if (
        weights.dtype in ("int4", "int8")
        and weights.symmetric is not True
        and (weights.dtype == "int4" or weights.symmetric is False)
    ):
        yield Problem(
            ("weights", "symmetric"), f"{weights.dtype} weights with zero points are not read by {name}; set it to true"
        )
    if kv.rotate != "none":
        yield Problem(("kv", "rotate"), f"{kv.rotate} is not computed by {name}; set it to none")
    if recipe.task != "generate":
        yield Problem(("task",), f"{recipe.task} is not run by {name}; build for openvino")
    if backend.strip_weights and recipe.parity.enabled:
        yield Problem(
            ("parity", "enabled"), "true is impossible with backend.strip_weights: engines without weights do not run"
        )


def _openvino(recipe: Recipe) -> Iterator[Problem]:
    compute, kv = recipe.backend.compute, recipe.kv
    if recipe.backend.device != "CPU":
        yield Problem(("backend", "device"), f"{recipe.backend.device} is impossible on openvino; allowed: CPU")
    if compute not in _OPENVINO_KV:
        yield Problem(
            ("backend", "compute"),
            f"{compute} is not computed by openvino on a CPU (it would fall back in silence); allowed: "
            + ", ".join(_OPENVINO_KV),
        )
    elif recipe.backend.attention == "openvino":
        yield from _openvino_attention(recipe, _OPENVINO_KV[compute])
    if kv.block_size != _OPENVINO_BLOCK_SIZE:
        yield Problem(
            ("kv", "block_size"), f"{kv.block_size} is impossible on openvino; allowed: {_OPENVINO_BLOCK_SIZE}"
        )
    group = recipe.backend.dynamic_quantization_group_size or 0
    if group % 32:
        yield Problem(("backend", "dynamic_quantization_group_size"), f"{group} is not allowed; 0, or a multiple of 32")
    elif group and recipe.weights.dtype not in ("int8", "int4", "checkpoint"):
        yield Problem(
            ("backend", "dynamic_quantization_group_size"),
            f"{group} has no effect on {recipe.weights.dtype} weights; set it to 0, or weights.dtype to int8",
        )


def _openvino_attention(recipe: Recipe, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """What OpenVINO's own operation does not do, and our kernels do."""
    kv, hint = recipe.kv, "; set backend.attention to native"
    for part in ("key", "value"):
        dtype = getattr(kv, part)
        if dtype not in allowed:
            yield Problem(
                ("kv", part),
                f"{dtype} is impossible with backend.compute {recipe.backend.compute} and backend.attention openvino; "
                f"allowed: {', '.join(allowed)}{hint}",
            )
    if kv.key != kv.value and kv.key in allowed and kv.value in allowed:
        yield Problem(
            ("kv", "value"),
            f"{kv.value} is impossible beside kv.key {kv.key} with backend.attention openvino, which stores both the "
            f"same{hint}",
        )
    if kv.rotate != "none":
        yield Problem(("kv", "rotate"), f"{kv.rotate} is impossible with backend.attention openvino{hint}")
    if kv.skip_layers:
        yield Problem(("kv", "skip_layers"), f"is impossible with backend.attention openvino{hint}")


_QUANTIZED = ("int8", "int4", "fp8")


def _weights(recipe: Recipe) -> Iterator[Problem]:
    weights = recipe.weights
    dtypes = [weights.dtype, *(override.dtype for override in weights.overrides if override.dtype)]
    quantizes = any(dtype in _QUANTIZED for dtype in dtypes)
    if weights.skip and not quantizes and weights.dtype != "checkpoint":
        yield Problem(
            ("weights", "skip"),
            f"names weights to leave unquantized, but weights.dtype {weights.dtype} quantizes none; "
            "remove it, or set weights.dtype to int8",
        )
    if weights.dtype not in _QUANTIZED:
        for name in ("group_size", "symmetric", "smooth"):
            if getattr(weights, name) is not None:
                yield Problem(
                    ("weights", name),
                    f"has no effect on {weights.dtype} weights; remove it, or set weights.dtype to int8",
                )
        if weights.method != "rtn":
            yield Problem(
                ("weights", "method"),
                f"{weights.method} quantizes, and weights.dtype {weights.dtype} does not; set it to int4 or int8",
            )
    yield from _schemes(recipe)
    yield from _methods(recipe)


def _schemes(recipe: Recipe) -> Iterator[Problem]:
    weights = recipe.weights
    if weights.dtype == "fp8" and weights.symmetric is False:
        yield Problem(("weights", "symmetric"), "false is impossible with fp8, which has no zero point; set it to true")
    for index, override in enumerate(weights.overrides):
        path = ("weights", "overrides", str(index))
        dtype = override.dtype or weights.dtype
        if override.dtype is None and override.group_size is None and override.symmetric is None:
            yield Problem(path, f"{override.match!r} overrides nothing; give it a dtype, group_size or symmetric")
        if override.dtype == "checkpoint" or weights.dtype == "checkpoint":
            yield Problem(path, "checkpoint weights come as they are; overrides go with a dtype to quantize to")
        elif dtype not in _QUANTIZED and (override.group_size is not None or override.symmetric is not None):
            yield Problem(path, f"group_size and symmetric have no effect on {dtype}; give it dtype int8, int4 or fp8")
        if dtype == "fp8" and override.symmetric is False:
            yield Problem(path, "symmetric false is impossible with fp8, which has no zero point")


def _methods(recipe: Recipe) -> Iterator[Problem]:
    weights = recipe.weights
    if "gptq" in weights.method and weights.dtype == "fp8":
        yield Problem(("weights", "method"), "gptq is for int8 and int4; fp8 has no even grid: use rtn or awq")
    if weights.mixed.max_kl is not None and weights.mixed.max_bits is not None:
        yield Problem(("weights", "mixed"), "max_kl and max_bits are two answers to one question; give one of them")
    if weights.mixed != type(weights.mixed)() and weights.dtype != "int4":
        yield Problem(
            ("weights", "mixed"), f"mixes int4 and int8, and weights.dtype is {weights.dtype}; set it to int4"
        )
    if weights.smooth is not None and weights.dtype == "int8" and recipe.backend.dynamic_quantization_group_size == 0:
        yield Problem(
            ("weights", "smooth"),
            "eases the quantization of activations, which backend.dynamic_quantization_group_size 0 turns off; "
            "set that to 32 or more, or to null, or remove smooth",
        )


def _kv(recipe: Recipe) -> Iterator[Problem]:
    kv = recipe.kv
    if kv.scales == "static" and not any(dtype.startswith("fp8") for dtype in (kv.key, kv.value)):
        yield Problem(
            ("kv", "scales"),
            f"static is impossible with a KV cache in {kv.key} and {kv.value}: fp8 alone takes a scale a layer; "
            "set it to dynamic, or kv to fp8_e4m3",
        )


def _limits(recipe: Recipe) -> Iterator[Problem]:
    limits = recipe.limits
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        yield Problem(
            ("limits", "max_num_batched_tokens"),
            f"{limits.max_num_batched_tokens} is less than limits.max_num_seqs {limits.max_num_seqs}: "
            "a step could not give each sequence its token; raise it, or lower max_num_seqs",
        )
    if recipe.parity.enabled and recipe.parity.new_tokens >= limits.max_context_len:
        yield Problem(
            ("parity", "new_tokens"),
            f"{recipe.parity.new_tokens} and a prompt do not fit in limits.max_context_len {limits.max_context_len}; "
            "lower it, raise max_context_len, or set parity.enabled to false",
        )


def _embedding(recipe: Recipe) -> Iterator[Problem]:
    if recipe.task == "embed":
        if recipe.speculation.is_on:
            text = "drafts what an engine generates, and task: embed generates nothing"
            yield Problem(("speculation", "method"), text)
        return
    default = EmbeddingConfig()
    for name in default.__struct_fields__:
        if getattr(recipe.embedding, name) != getattr(default, name):
            yield Problem(("embedding", name), f"has no effect with task: {recipe.task}; remove it, or set task: embed")


def _quality(recipe: Recipe) -> Iterator[Problem]:
    embeds = recipe.task == "embed"
    for name in recipe.quality.__struct_fields__:
        bound = getattr(recipe.quality, name)
        if bound is not None and (name == "min_cosine") is not embeds:
            usable = "min_cosine" if embeds else "max_kl, min_top1, max_perplexity_ratio"
            yield Problem(("quality", name), f"{bound} bounds nothing with task: {recipe.task}; usable: {usable}")
    if recipe.parity.enabled:
        return
    for name in recipe.quality.__struct_fields__:
        bound = getattr(recipe.quality, name)
        if bound is not None:
            yield Problem(
                ("quality", name),
                f"{bound} cannot be enforced while parity.enabled is false; enable parity, or remove the bound",
            )
