"""The attention kernels as TensorRT plugins launch them: which tensors, which kernel, the order of its parameters.

A plugin that is compiled ahead of time launches one kernel, so one attention node becomes a chain of plugins:

    WriteKV        key, value, caches, tables        -> the caches, aliased to the ones that came in
    Attend         query, caches, tables, sinks, ... -> attention [T, num_heads * v_head_size]
    AttendSplits   the same                          -> partial results f32 [splits, T, num_heads, v_head_size], [.., 2]
    MergeSplits    partial results                   -> attention

TensorRT passes inputs, then lengths, then outputs. Lengths may be numbers, or its expressions of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plugins.gpu.aot import Variant
from plugins.paged_attention.grids import BLOCK_N, attend_grid, merge_constants

TABLES = ("past_lens", "query_starts", "block_ids", "block_starts")
LAYER = {
    "num_heads": int, "num_kv_heads": int, "head_size": int, "v_head_size": int, "scale": float, "sliding_window": int,
    "softcap": float, "kv_dtype": str, "group_size": int, "key_scale": float, "value_scale": float, "block_size": int,
    "compute_capability": int,
}  # fmt: skip
TACTICS = {0: BLOCK_N, 1: 32, 2: 64, 3: 128}  # keys a tile; 0 is what runs without tuning


@dataclass(frozen=True)
class Plugin:
    """Inputs and outputs by name, attributes with their types, and how many tactics there are to choose from."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, type]
    launch: Callable[[Mapping[str, str], Mapping[str, Any], Any, Any, int], Launch]
    tactics: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A kernel and its launch.

    Attributes:
        parameters: for each parameter that TensorRT passes, the kernel's that takes it; None: the kernel needs none.
        aliases: parameters of the kernel that take what another takes.
    """

    variant: Variant
    grid: tuple[Any, ...]
    lengths: tuple[Any, ...]
    parameters: tuple[str | None, ...]
    aliases: Mapping[str, str]


def _write(kinds: Mapping[str, str], attributes: Mapping[str, Any], tokens: Any, sequences: Any, tactic: int) -> Launch:
    from plugins.paged_attention.kernel_write import rope_and_write

    shape = _shape(attributes)
    types = _pages(shape, kinds) | {name: kinds[name] for name in ("key", "value", *TABLES)}
    # Without rotation these are not read.
    unused = dict.fromkeys(("query", "cos", "sin", "positions", "query_out"), "key")
    types |= dict.fromkeys(unused, kinds["key"])
    constants = shape.write_constants(rotary=0, interleaved=False)
    variant = Variant("WriteKV", rope_and_write, types, constants, num_warps=1, fp_fusion=False)
    # The caches that come in are the ones that go out.
    order = ("key", "value", None, None, *TABLES, "num_sequences", "key_cache", "value_cache")
    return Launch(variant, (tokens, attributes["num_kv_heads"]), (sequences,), order, unused | _SCALES)


def _attend(
    kinds: Mapping[str, str], attributes: Mapping[str, Any], tokens: Any, sequences: Any, tactic: int
) -> Launch:
    return _attending("Attend", 1, kinds, attributes, tokens, sequences, tactic)


def _attend_splits(
    kinds: Mapping[str, str], attributes: Mapping[str, Any], tokens: Any, sequences: Any, tactic: int
) -> Launch:
    return _attending("AttendSplits", attributes["splits"], kinds, attributes, tokens, sequences, tactic)


def _attending(
    name: str,
    splits: int,
    kinds: Mapping[str, str],
    attributes: Mapping[str, Any],
    tokens: Any,
    sequences: Any,
    tactic: int,
) -> Launch:
    from plugins.paged_attention.kernel import attend

    shape = _shape(attributes)
    types = _pages(shape, kinds) | {n: kinds[n] for n in ("query", *TABLES, "sinks", "alibi_slopes")}
    if splits > 1:
        outputs, unused = ("partial", "partial_stats"), {"output": "query"}
        types |= {"partial": "*fp32", "partial_stats": "*fp32", "output": kinds["query"]}
    else:
        outputs, unused = ("output",), {"partial": "output", "partial_stats": "output"}
        types |= dict.fromkeys(("output", "partial", "partial_stats"), kinds["query"])
    constants = shape.attend_constants(
        sinks=bool(attributes["has_sinks"]), alibi=bool(attributes["has_alibi"]), splits=splits,
        block_m=attributes["block_m"], block_n=TACTICS[tactic],
    )  # fmt: skip
    order = ("query", "key_cache", "value_cache", *TABLES, "sinks", "alibi_slopes", "num_tokens", "num_sequences")
    group = attributes["num_heads"] // attributes["num_kv_heads"]
    grid = attend_grid(tokens, sequences, group, attributes["num_kv_heads"], attributes["block_m"], splits)
    return Launch(
        Variant(name, attend, types, constants), grid, (tokens, sequences), (*order, *outputs), unused | _SCALES
    )


def _merge(kinds: Mapping[str, str], attributes: Mapping[str, Any], tokens: Any, sequences: Any, tactic: int) -> Launch:
    from plugins.paged_attention.kernel import reduce_splits

    types = {"partial": kinds["partial"], "partial_stats": kinds["partial_stats"], "output": kinds["like"]}
    variant = Variant(
        "MergeSplits", reduce_splits, types, merge_constants(attributes["v_head_size"], attributes["splits"])
    )
    rows = tokens * attributes["num_heads"]
    return Launch(variant, (rows,), (rows,), ("partial", "partial_stats", None, "num_rows", "output"), {})


_SCALES = {"key_scales": "key_cache", "value_scales": "value_cache"}  # beside the cells, in one memory
_ATTEND = LAYER | {"has_sinks": int, "has_alibi": int, "splits": int, "block_m": int}
_ATTEND_INPUTS = ("query", "key_cache", "value_cache", *TABLES, "sinks", "alibi_slopes")
_MERGE: dict[str, type] = dict.fromkeys(("num_heads", "v_head_size", "splits", "compute_capability"), int)
PLUGINS = {
    "WriteKV": Plugin(
        ("key", "value", "key_cache", "value_cache", *TABLES), ("key_cache_out", "value_cache_out"), LAYER, _write
    ),
    "Attend": Plugin(_ATTEND_INPUTS, ("attention",), _ATTEND, _attend, tuple(TACTICS)[1:]),
    "AttendSplits": Plugin(_ATTEND_INPUTS, ("partial", "partial_stats"), _ATTEND, _attend_splits, tuple(TACTICS)[1:]),
    "MergeSplits": Plugin(("partial", "partial_stats", "like"), ("attention",), _MERGE, _merge),
}


def _shape(attributes: Mapping[str, Any]) -> Any:
    from plugins.paged_attention.native import formats
    from plugins.paged_attention.torch_kernel import AttentionShape

    names = (
        "num_heads",
        "num_kv_heads",
        "head_size",
        "v_head_size",
        "scale",
        "block_size",
        "sliding_window",
        "softcap",
    )
    key, value = formats(attributes)
    return AttentionShape(
        **{name: attributes[name] for name in names}, key_format=key, value_format=value,
        native_fp8=attributes["compute_capability"] >= 89,
    )  # fmt: skip


def _pages(shape: Any, kinds: Mapping[str, str]) -> dict[str, str]:
    """The caches' pointer types: TensorRT carries bytes as int8, and the codes of fp8 and int4 are unsigned."""
    types = {}
    for part, form in (("key", shape.key_format), ("value", shape.value_format)):
        cells = "*u8" if form.packed and form.dtype != "int8" else kinds[f"{part}_cache"]
        types |= {f"{part}_cache": cells, f"{part}_scales": "*bf16" if form.packed else cells}
    return types
