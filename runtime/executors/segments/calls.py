"""Which kernels an attention layer launches, with which grid and arguments; and those that copy blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plugins.paged_attention.grids import COPY_WORDS, attend_grid
from runtime.executors.segments.plan import Attention, Kernel, SegmentPlan


@dataclass(frozen=True)
class Call:
    """One launch. `arguments`: an address or number for each of the kernel's parameters."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """What a launch depends on: tokens, sequences, the longest context, multiprocessors of the device."""

    tokens: int
    sequences: int
    max_context_len: int
    multiprocessors: int


def kind_of(plan: SegmentPlan, layer: Attention, sizes: Sizes) -> str:
    """`prefill`, `whole` or `splits`: what attends best. Speed alone depends on it."""
    if sizes.tokens >= 4 * sizes.sequences:
        return "prefill"
    # A decode of few sequences leaves multiprocessors idle, unless long keys are shared out.
    splits = plan.kernels[layer.splits].constants
    busy = sizes.sequences * layer.num_kv_heads >= sizes.multiprocessors
    return "whole" if busy or sizes.max_context_len < 2 * splits["SPLITS"] * splits["BLOCK_N"] else "splits"


def attention_calls(
    plan: SegmentPlan, layer: Attention, kind: str, sizes: Sizes, address: Callable[[str], int]
) -> list[Call]:
    """Write the new keys and values, attend, and merge where the keys are split. `address(name)`: of values and inputs,
    of `key_cache.L` and `value_cache.L`, `partial` and `partial_stats`.
    """
    query, output = address(layer.query), address(layer.output)
    pages = {f"{part}_{what}": address(f"{part}_cache.{layer.layer}") for part in ("key", "value") for what in _VIEWS}
    tables = {name: address(name) for name in ("past_lens", "query_starts", "block_ids", "block_starts")}
    new = {"key": address(layer.key), "value": address(layer.value)}
    write = dict.fromkeys(("query", "query_out", "cos", "sin", "positions"), new["key"])  # unused without rotation
    calls = [
        _call(plan, layer.write, (sizes.tokens, layer.num_kv_heads), {
            **write, **new, **pages, **tables, "num_sequences": sizes.sequences,
        })
    ]  # fmt: skip
    name = {"prefill": layer.prefill, "whole": layer.whole, "splits": layer.splits}[kind]
    constants = plan.kernels[name].constants
    splits = constants["SPLITS"]
    group = layer.num_heads // layer.num_kv_heads
    grid = attend_grid(sizes.tokens, sizes.sequences, group, layer.num_kv_heads, constants["BLOCK_M"], splits)
    calls.append(
        _call(plan, name, grid, {
            "query": query, **pages, **tables, "output": output,
            "sinks": address(layer.sinks) if layer.sinks else query,
            "alibi_slopes": address(layer.alibi_slopes) if layer.alibi_slopes else query,
            "partial": address("partial") if splits > 1 else output,
            "partial_stats": address("partial_stats") if splits > 1 else output,
            "num_tokens": sizes.tokens, "num_sequences": sizes.sequences,
        })
    )  # fmt: skip
    if splits > 1:
        rows = sizes.tokens * layer.num_heads
        parts = {"partial": address("partial"), "partial_stats": address("partial_stats")}
        calls.append(_call(plan, layer.merge, (rows,), {**parts, "output": output, "num_rows": rows}))
    return calls


_VIEWS = ("cache", "scales")  # one memory, read as cells and as the scales beside them


def copy_word(block_bytes: int) -> int:
    """Bytes of the widest word that divides a block."""
    return next(word for word in (8, 4, 1) if block_bytes % word == 0)


def copy_call(plan: SegmentPlan, bases: int, arrays: int, pairs: int, count: int, block_bytes: int) -> Call:
    """Copy `count` pairs of blocks (a table at `pairs`) in `arrays` arrays, whose addresses stand at `bases`."""
    word = copy_word(block_bytes)
    words = block_bytes // word
    grid = (count, arrays, -(-words // COPY_WORDS))
    return _call(plan, plan.copies[str(word)], grid, {"bases": bases, "pairs": pairs, "block_words": words})


def _call(plan: SegmentPlan, name: str, grid: tuple[int, ...], given: Mapping[str, int]) -> Call:
    kernel: Kernel = plan.kernels[name]
    return Call(name, grid, tuple(given[parameter] for parameter, _ in kernel.parameters))
