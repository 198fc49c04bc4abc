"""A paged KV cache in host memory: one flat array a cache input, so that a block is one run of bytes in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention.memory import zeroed
from runtime.errors import PlancastError
from runtime.memory import available_memory, format_size

if TYPE_CHECKING:
    from runtime.kv_layout import KvLayout


class KvCache:
    """The memory of `num_blocks` blocks over several arrays, whose blocks have `block_bytes[i]` bytes each.

    Attributes:
        arrays: u8 [num_blocks * block_bytes[i]], one a cache input, in the order given; zeroed.
    """

    def __init__(self, num_blocks: int, block_bytes: Sequence[int]):
        self.num_blocks = num_blocks
        # Inputs with blocks of one size lie in one allocation [inputs, num_blocks, block bytes]: a block is then copied
        # in one call for all of them.
        self._groups: list[NDArray[np.uint8]] = []
        arrays: dict[int, NDArray[np.uint8]] = {}
        for size in sorted(set(block_bytes)):
            members = [i for i, other in enumerate(block_bytes) if other == size]
            group = zeroed(len(members) * num_blocks * size).reshape(len(members), num_blocks, size)
            self._groups.append(group)
            arrays |= {i: array.reshape(-1) for i, array in zip(members, group, strict=True)}
        self.arrays = [arrays[i] for i in range(len(block_bytes))]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks, in order."""
        for source, target in copies:
            self._check(source)
            self._check(target)
            for group in self._groups:
                group[:, target] = group[:, source]

    def read_block(self, block_id: int) -> bytes:
        """The block's bytes in every array."""
        self._check(block_id)
        return b"".join(group[:, block_id].tobytes() for group in self._groups)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned. Raises `ValueError` where `data` has another length."""
        self._check(block_id)
        expected = sum(group.shape[0] * group.shape[2] for group in self._groups)
        if len(data) != expected:
            raise ValueError(f"a block has {expected} bytes, and {len(data)} were given")
        offset = 0
        for group in self._groups:
            count = group.shape[0] * group.shape[2]
            group[:, block_id] = np.frombuffer(data, np.uint8, count, offset).reshape(group.shape[0], -1)
            offset += count

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}, not {block_id}")


class CacheOwner:
    """What executors with a `KvCache` have in common: the half of `Executor` that is about blocks."""

    kv_layout: KvLayout
    _cache: KvCache | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks allocated so far (0 before `allocate`)."""
        return self._cache.num_blocks if self._cache else 0

    def read_block(self, block_id: int) -> bytes:
        """The block's cells of every layer, as `write_block` takes them back."""
        return self._allocated().read_block(block_id)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned, into any block. Raises `ValueError` where `data` has another length."""
        self._allocated().write_block(block_id, data)

    def _new_cache(self, num_blocks: int, block_bytes: Sequence[int]) -> KvCache:
        """A cache of the layout. Raises `PlancastError`: fewer than one block, or more than the free memory holds."""
        if num_blocks < 1:
            raise PlancastError(f"a KV cache needs at least one block, not {num_blocks}")
        needed, free = num_blocks * self.kv_layout.bytes_per_block, available_memory()
        if needed > free.bytes:
            raise PlancastError(
                f"a KV cache of {num_blocks} blocks takes {format_size(needed)}, and {format_size(free.bytes)} are "
                f"free ({free.limited_by}). Ask for less (--kv-cache-memory), or free memory"
            )
        return KvCache(num_blocks, block_bytes)

    def _allocated(self) -> KvCache:
        if self._cache is None:
            raise PlancastError("the executor has no KV cache: call allocate first")
        return self._cache
