"""The host swap tier: KV blocks of preempted sequences, and evicted prefix-cache blocks, in a memory-mapped file.

`SwapSlots` is the bookkeeping, which the scheduler asks; `SwapFile` holds the bytes. The file is created sparse and
unlinked at once: it takes disk only for what was swapped, and no crash can leave it behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from typing import NamedTuple

from runtime.errors import PlancastError


class SwapMove(NamedTuple):
    """A copy between a block and a slot. Moves are carried out in the order in which they were planned."""

    to_file: bool
    block_id: int
    slot: int


class SwapSlots:
    """Slots 0 to `num_slots` - 1, each as large as one block, each held by a preempted request or a cached block."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._untouched = 0  # slots from here on were never used
        self._free: list[int] = []
        self._used: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, or None where fewer are free. Used ones come first, so that the file stays short."""
        if count > self.num_free:
            return None
        reused = min(count, len(self._free))
        slots = [self._free.pop() for _ in range(reused)]
        slots += range(self._untouched, self._untouched + count - reused)
        self._untouched += count - reused
        self._used.update(slots)
        return slots

    def free(self, slot: int) -> None:
        """Give a slot back. What it holds may be read by moves planned before the next `allocate`."""
        if slot not in self._used:
            raise ValueError(f"swap slot {slot} is not in use: it cannot be freed")
        self._used.remove(slot)
        self._free.append(slot)

    def check(self, expected: set[int]) -> None:
        """Assert that exactly the `expected` slots are in use."""
        if self._used != expected:
            raise AssertionError(f"swap slots in use {sorted(self._used)}, expected {sorted(expected)}")
        if sorted([*self._free, *self._used]) != list(range(self._untouched)):
            raise AssertionError("swap slots are lost or doubled")


class SwapFile:
    """Block contents by slot. Raises `PlancastError` where the folder cannot hold the file."""

    def __init__(self, num_slots: int, block_bytes: int, folder: str | None = None):
        self.block_bytes = block_bytes
        size = num_slots * block_bytes
        try:
            with tempfile.TemporaryFile(prefix="plancast-swap-", dir=folder) as file:
                free = os.fstatvfs(file.fileno())
                if size > free.f_bavail * free.f_frsize:
                    raise OSError(errno.ENOSPC, f"{free.f_bavail * free.f_frsize} bytes are free")
                os.ftruncate(file.fileno(), size)
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), size)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise PlancastError(
                f"cannot make a swap file of {size} bytes in {where}: {error.strerror or error}. "
                f"Lower swap_space, or set swap_folder to a folder with room"
            ) from error

    def write(self, slot: int, data: bytes) -> None:
        """Keep a block's contents, at most `block_bytes` of them."""
        assert self._map is not None
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {len(data)} bytes, the swap file's slots {self.block_bytes}")
        self._map[slot * self.block_bytes : (slot + 1) * self.block_bytes] = data

    def read(self, slot: int) -> bytes:
        """What was last written to the slot."""
        assert self._map is not None
        return self._map[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Give the disk back. Idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None
