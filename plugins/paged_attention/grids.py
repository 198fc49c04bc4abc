"""How the attention kernels are launched: plain arithmetic on sizes, for every caller (torch, TensorRT, the driver).

Lengths may be numbers, or TensorRT's expressions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK_N = 64  # keys a tile
COPY_WORDS = 1024  # of a block, a program


def attend_grid(tokens: Any, sequences: Any, group: int, num_kv_heads: int, block_m: int, splits: int) -> tuple:
    """Of `attend`: tiles of `block_m` rows (tokens x the `group` query heads of a key/value head), heads, splits."""
    return tokens // (block_m // group) + sequences, num_kv_heads, splits


def choose_splits(programs: int, max_context_len: int, block_n: int, multiprocessors: int) -> int:
    """Splits of the keys that fill `multiprocessors` twice over, none shorter than four tiles; a power of two."""
    splits = 1
    while programs * splits < 2 * multiprocessors and max_context_len // (2 * splits) >= 4 * block_n and splits < 64:
        splits *= 2
    return splits


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is `value` or more, and `least` or more."""
    return max(least, 1 << max(0, value - 1).bit_length())


def merge_constants(v_head_size: int, splits: int) -> dict[str, int]:
    """Compile-time constants of `reduce_splits`."""
    return {
        "V_HEAD_SIZE": v_head_size,
        "SPLITS": splits,
        "BLOCK_S": power_of_two(splits),
        "BLOCK_DV": power_of_two(v_head_size, 16),
    }


def copy_waves(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(source, target) pairs in waves whose pairs may run at once, in any order, as if one came after the other."""
    waves: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in copies:
        if not waves or source in targets or target in sources or target in targets:
            waves.append([])
            sources, targets = set(), set()
        waves[-1].append((source, target))
        sources.add(source)
        targets.add(target)
    return waves
