"""Finds full, computed KV blocks again by what they hold.

A block is known by a chained digest of (the parent's digest, its tokens); the chain starts at a root made of tagged
extras (`cache_salt`, an adapter), so that different extras never share. A digest only finds a candidate: its tokens
are compared, and its ancestors' too, so that no collision of any kind can serve another prompt's keys and values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.block_pool import BlockPool

if TYPE_CHECKING:
    from runtime.scheduling.spill import SpillTier

Extras = tuple[tuple[str, str], ...]  # (tag, value) pairs, e.g. (("cache_salt", "tenant-7"),)


def blake2b_16(data: bytes) -> bytes:
    """The default digest: 128 bits, not forgeable by a chosen prompt (unlike `hash` of a tuple of ints)."""
    return hashlib.blake2b(data, digest_size=16).digest()


class CachedBlock:
    """One known block: a node in the chain from its root. `block_id` is -1 once the block was evicted, also while
    its contents wait in the spill tier."""

    __slots__ = ("block_id", "digest", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: CachedBlock | None, block_id: int):
        self.digest = digest
        self.tokens = tokens  # int32 token ids; a root holds its extras
        self.parent = parent
        self.block_id = block_id


def same_chain(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """Whether two nodes stand for the same tokens after the same ancestors (usually the same object)."""
    while a is not b:
        if a is None or b is None or a.digest != b.digest or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Maps digests to blocks of `pool`, which tells when it reuses an idle block. `spill`: where such a block's
    contents go, if anywhere."""

    def __init__(self, block_size: int, pool: BlockPool, digest: Callable[[bytes], bytes] = blake2b_16):
        self.block_size = block_size
        self.pool = pool
        self._digest = digest
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self.spill: SpillTier | None = None
        pool.on_evict = self._reused

    def __len__(self) -> int:
        return len(self._by_block)

    def root(self, extras: Extras = ()) -> CachedBlock:
        """The node that a prompt with these extras starts from."""
        encoded = b"".join(
            b"%d:%d:%b%b" % (len(tag), len(value), tag, value)
            for tag, value in ((t.encode(), v.encode()) for t, v in sorted(extras))
        )
        return CachedBlock(self._digest(b"root:" + encoded), b"root:" + encoded, None, -1)

    def extend_digests(self, digests: list[bytes], tokens: array[int], root: CachedBlock, num_blocks: int) -> None:
        """Append digests until the first `num_blocks` blocks of `tokens` have one."""
        size, digest = self.block_size, self._digest
        parent = digests[-1] if digests else root.digest
        for start in range(len(digests) * size, num_blocks * size, size):
            parent = digest(parent + tokens[start : start + size].tobytes())
            digests.append(parent)

    def find(self, digest: bytes, tokens: bytes, parent: CachedBlock) -> CachedBlock | None:
        """The cached block that holds `tokens` after `parent`, or None."""
        return self._verified(self._by_digest.get(digest), tokens, parent)

    def _verified(self, node: CachedBlock | None, tokens: bytes, parent: CachedBlock) -> CachedBlock | None:
        if node is None or node.tokens != tokens:
            return None
        if node.parent is not parent:
            if not same_chain(node.parent, parent):
                return None
            node.parent = parent  # the same contents: the older twin may go
        return node

    def match(self, tokens: array[int], digests: list[bytes], root: CachedBlock, max_blocks: int) -> list[CachedBlock]:
        """The longest chain of cached blocks that `tokens` begins with, at most `max_blocks` of them.

        Those with a `block_id` of -1 wait in the spill tier: `restore` them, or leave them there.
        """
        self.extend_digests(digests, tokens, root, max_blocks)
        size, parent, found = self.block_size, root, []
        for index in range(max_blocks):
            block_tokens = tokens[index * size : (index + 1) * size].tobytes()
            node = self.find(digests[index], block_tokens, parent)
            if node is None and self.spill is not None:
                node = self._verified(self.spill.find(digests[index]), block_tokens, parent)
            if node is None:
                break
            found.append(node)
            parent = node
        return found

    def register(self, block_id: int, digest: bytes, tokens: bytes, parent: CachedBlock) -> CachedBlock:
        """Make a full, computed block known, unless its contents are already. Returns the node to chain from."""
        known = self.find(digest, tokens, parent)
        if known is not None:
            return known
        node = CachedBlock(digest, tokens, parent, block_id)
        if digest in self._by_digest or block_id in self._by_block:
            node.block_id = -1  # a digest collision, or a block known under another chain: stays private
            return node
        self._know(node, block_id)
        if self.spill is not None:
            self.spill.discard(digest)
        return node

    def _know(self, node: CachedBlock, block_id: int) -> None:
        node.block_id = block_id
        self._by_digest[node.digest] = node
        self._by_block[block_id] = node
        self.pool.mark_cached(block_id)

    def restore(self, nodes: list[CachedBlock]) -> None:
        """Bring back matched blocks out of the spill tier, into blocks of the pool with one reference each.

        The pool must have as many free blocks.
        """
        assert self.spill is not None
        # All are taken first: what the allocations evict may need the room of the oldest.
        slots = [self.spill.take(node) for node in nodes]
        for node, slot in zip(nodes, slots, strict=True):
            block_id = self.pool.allocate()
            self.spill.restore(slot, block_id)
            self._know(node, block_id)

    def _reused(self, block_id: int) -> None:
        node = self.evict(block_id)
        if self.spill is not None:
            self.spill.add(node, block_id)

    def evict(self, block_id: int) -> CachedBlock:
        """Forget a block (the pool reuses it). Returns the node that it had."""
        node = self._by_block.pop(block_id)
        del self._by_digest[node.digest]
        node.block_id = -1
        return node

    def reset(self) -> int:
        """Forget everything; blocks in use stay with their sequences. Returns how many blocks were known."""
        count = len(self._by_block)
        if self.spill is not None:
            count += self.spill.clear()
        for block_id in list(self._by_block):
            self.evict(block_id)
            self.pool.unmark_cached(block_id)
        return count

    def check(self) -> None:
        """Assert that the two maps and the pool's marks agree."""
        for block_id, node in self._by_block.items():
            if node.block_id != block_id or self._by_digest.get(node.digest) is not node:
                raise AssertionError(f"block {block_id}'s node is stale or unreachable")
            if not self.pool.cached[block_id]:
                raise AssertionError(f"block {block_id} is known to the prefix cache and not marked in the pool")
        if len(self._by_block) != len(self._by_digest) or sum(self.pool.cached) != len(self._by_block):
            raise AssertionError(
                f"{len(self._by_block)} known blocks, {len(self._by_digest)} digests, {sum(self.pool.cached)} marks"
            )
