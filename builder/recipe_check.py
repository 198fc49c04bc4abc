"""Combinations of keys that no engine can honour, each with the reason. Keys are checked one by one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from builder.recipe import Recipe

# OpenVINO's paged attention on x86 by compute dtype: the KV dtypes whose values are stored as asked for (measured on
# 2026.4.1). It refuses f32 + bf16 and bf16 + f32 when the model runs, and turns bf16 + f16 into bf16 in silence.
_OPENVINO_KV = {"f32": ("f32", "f16", "int8"), "bf16": ("bf16", "int8")}
_OPENVINO_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """A key that cannot stand beside the others."""

    path: tuple[str, ...]
    text: str


def impossible(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is impossible in `recipe`; nothing where it can be built."""
    if recipe.backend.name == "openvino":
        yield from _openvino(recipe)
    yield from _weights(recipe)
    yield from _limits(recipe)
    yield from _quality(recipe)


def _openvino(recipe: Recipe) -> Iterator[Problem]:
    compute, kv = recipe.backend.compute, recipe.kv
    if compute not in _OPENVINO_KV:
        yield Problem(
            ("backend", "compute"),
            f"{compute} is not computed by openvino on a CPU (it would fall back in silence); allowed: "
            + ", ".join(_OPENVINO_KV),
        )
    else:
        allowed = _OPENVINO_KV[compute]
        for part in ("key", "value"):
            dtype = getattr(kv, part)
            if dtype not in allowed:
                yield Problem(
                    ("kv", part),
                    f"{dtype} is impossible with backend.compute {compute} on openvino; allowed: {', '.join(allowed)}",
                )
        if kv.key != kv.value and kv.key in allowed and kv.value in allowed:
            yield Problem(
                ("kv", "value"), f"{kv.value} is impossible beside kv.key {kv.key} on openvino; both must be the same"
            )
    if kv.block_size != _OPENVINO_BLOCK_SIZE:
        yield Problem(
            ("kv", "block_size"), f"{kv.block_size} is impossible on openvino; allowed: {_OPENVINO_BLOCK_SIZE}"
        )
    group = recipe.backend.dynamic_quantization_group_size
    if group % 32:
        yield Problem(("backend", "dynamic_quantization_group_size"), f"{group} is not allowed; 0, or a multiple of 32")
    elif group and recipe.weights.dtype != "int8":
        yield Problem(
            ("backend", "dynamic_quantization_group_size"),
            f"{group} has no effect on {recipe.weights.dtype} weights; set it to 0, or weights.dtype to int8",
        )


def _weights(recipe: Recipe) -> Iterator[Problem]:
    if recipe.weights.skip and recipe.weights.dtype != "int8":
        yield Problem(
            ("weights", "skip"),
            f"names weights to leave unquantized, but weights.dtype {recipe.weights.dtype} quantizes none; "
            "remove it, or set weights.dtype to int8",
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


def _quality(recipe: Recipe) -> Iterator[Problem]:
    if recipe.parity.enabled:
        return
    for name in recipe.quality.__struct_fields__:
        bound = getattr(recipe.quality, name)
        if bound is not None:
            yield Problem(
                ("quality", name),
                f"{bound} cannot be enforced while parity.enabled is false; enable parity, or remove the bound",
            )
