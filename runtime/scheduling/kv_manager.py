"""Block tables: who holds which blocks, from admission through growth, fork and roll-back to release.

Writes are copy-on-write: a block that another table or the prefix cache knows is never written, its writer gets a
copy. Copies are collected in a list of (source, target) and carried out by the executor before the pass.
"""

from __future__ import annotations

from array import array
from collections import Counter

from runtime.block_pool import BlockPool
from runtime.prefix_cache import CachedBlock, PrefixCache
from runtime.scheduling.spill import SpillTier
from runtime.sequence import NEVER, Request, Sequence
from runtime.swap import SwapMove, SwapSlots

Copies = list[tuple[int, int]]


class KvManager:
    """Keeps the block tables of all sequences over one pool. `cache` is None where prefix caching is off."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(block_size, self.pool) if enable_prefix_caching else None
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # prompt tokens found
        self.reserved = 0  # free blocks promised to protected requests
        self.moves: list[SwapMove] = []  # to and from the host tier, planned for the next step

    def spill_to(self, slots: SwapSlots) -> None:
        """Keep evicted cached blocks in the host tier from now on."""
        if self.cache is not None:
            self.cache.spill = SpillTier(slots, self.moves)

    @property
    def spill(self) -> SpillTier | None:
        return self.cache.spill if self.cache is not None else None

    # --- admission ---------------------------------------------------------------------------------------------

    def acquire(self, request: Request, headroom: int) -> bool:
        """Give every live sequence a table for all of its tokens, out of cached blocks as far as there are any.

        Takes nothing and returns False where that would leave fewer than `headroom` blocks. A protected request also
        needs its worst case to fit.
        """
        matches: list[list[CachedBlock]] = []
        missing: list[int] = []
        for sequence in request.live:
            match = self._match(sequence)
            shared = self._common_blocks(request.live[0], sequence) if matches else 0
            if shared > len(match):  # the first sequence computes (or found) these; this one only refers to them
                match = []
            for node in match:
                if node.block_id >= 0:
                    self.pool.share(node.block_id)
            sequence.shared_tokens = (shared if not match else 0) * self.block_size
            matches.append(match)
            missing.append(-(-len(sequence.tokens) // self.block_size) - max(len(match), shared))
        spilled = list(dict.fromkeys(node for match in matches for node in match if node.block_id < 0))
        needed = sum(missing) + len(spilled)
        if request.protected:
            held = len({node.block_id for match in matches for node in match if node.block_id >= 0})
            needed = max(needed, request.max_blocks(self.block_size) - held)
        if self.pool.num_free - needed < headroom + self.reserved:
            for match in matches:
                self.pool.release_table([node.block_id for node in match if node.block_id >= 0])
            return False
        if spilled:
            self._restore(spilled, matches)
        self._fill(request, matches, missing)
        return True

    def _restore(self, spilled: list[CachedBlock], matches: list[list[CachedBlock]]) -> None:
        """Bring spilled blocks back, with a reference for each match that holds them."""
        assert self.cache is not None
        self.cache.restore(spilled)
        restored = {node.block_id for node in spilled}
        for match in matches:
            for node in match:
                if node.block_id in restored:
                    self.pool.share(node.block_id)
        for block_id in restored:
            self.pool.release(block_id)

    def _fill(self, request: Request, matches: list[list[CachedBlock]], missing: list[int]) -> None:
        pool, size = self.pool, self.block_size
        for sequence, match, count in zip(request.live, matches, missing, strict=True):
            table = array("i", [node.block_id for node in match])
            if sequence.shared_tokens:
                table.extend(request.live[0].block_ids[: sequence.shared_tokens // size])
                for block_id in table:
                    pool.share(block_id)
            table.extend([pool.allocate() for _ in range(count)])
            sequence.block_ids = table
            sequence.num_computed = len(match) * size
            self._chain_from(sequence, match)
            if request.num_preemptions == 0 and not sequence.shared_tokens:
                self.prefix_queries += len(sequence.tokens)
                self.prefix_hits += sequence.num_computed

    def _match(self, sequence: Sequence) -> list[CachedBlock]:
        """The cached blocks it can start from. Its last token is always computed: its logits are wanted."""
        if self.cache is None or not sequence.request.reads_cache:
            return []
        root = self._root(sequence.request)
        return self.cache.match(sequence.tokens, sequence.digests, root, (len(sequence.tokens) - 1) // self.block_size)

    def _common_blocks(self, first: Sequence, other: Sequence) -> int:
        """Full leading blocks that two sequences of a request have in common, both last tokens left out."""
        size = self.block_size
        limit = min(len(first.tokens) - 1, len(other.tokens) - 1) // size
        count = min(first.request.num_prompt_tokens // size, limit)
        while (
            count < limit
            and first.tokens[count * size : (count + 1) * size] == other.tokens[count * size : (count + 1) * size]
        ):
            count += 1
        return count

    def _root(self, request: Request) -> CachedBlock:
        assert self.cache is not None
        if request.root is None:
            salt = request.message.cache_salt
            request.root = self.cache.root(() if salt is None else (("cache_salt", salt),))
        return request.root

    def _chain_from(self, sequence: Sequence, match: list[CachedBlock]) -> None:
        """Start offering blocks to the prefix cache after the matched ones."""
        if self.cache is None:
            return
        sequence.num_committed = len(match)
        sequence.prefix_node = match[-1] if match else self._root(sequence.request)
        sequence.commit_at = (len(match) + 1) * self.block_size

    # --- prefill -----------------------------------------------------------------------------------------------

    def extend_match(self, sequence: Sequence) -> int:
        """Trade blocks that another request has computed in the meantime for our own uncomputed ones.

        Returns the tokens gained. Only for a request's sole sequence: siblings refer to its blocks.
        """
        size, cache = self.block_size, self.cache
        request = sequence.request
        if cache is None or not request.reads_cache or len(request.live) != 1 or sequence.prefix_node is None:
            return 0
        start = sequence.num_computed
        limit = (len(sequence.tokens) - 1) // size
        while sequence.num_committed == (index := sequence.num_computed // size) and index < limit:
            cache.extend_digests(sequence.digests, sequence.tokens, self._root(request), index + 1)
            tokens = sequence.tokens[index * size : (index + 1) * size].tobytes()
            node = cache.find(sequence.digests[index], tokens, sequence.prefix_node)
            if node is None:
                break
            self.pool.share(node.block_id)
            self.pool.release(sequence.block_ids[index])
            sequence.block_ids[index] = node.block_id
            sequence.num_computed = (index + 1) * size
            sequence.num_committed, sequence.prefix_node = index + 1, node
            sequence.commit_at = (index + 2) * size
        self.prefix_hits += sequence.num_computed - start
        return sequence.num_computed - start

    # --- growth ------------------------------------------------------------------------------------------------

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the next tokens go into one block that is the sequence's own already: by far the most usual."""
        table, start = sequence.block_ids, sequence.num_computed
        at = (start + num_tokens - 1) // self.block_size
        if at >= len(table) or start // self.block_size != at:
            return False
        return self.pool.ref_counts[table[at]] == 1 and not self.pool.cached[table[at]]

    def blocks_to_grow(self, sequences: list[Sequence], counts: list[int]) -> int:
        """Blocks that writing each sequence's next tokens takes, in this order: new ones, and copies of shared ones.

        Of sequences that share a block, the last one to write it needs no copy.
        """
        size, refs, cached = self.block_size, self.pool.ref_counts, self.pool.cached
        needed = 0
        left: dict[int, int] = {}  # references to a block once the sequences before have their copies
        for sequence, count in zip(sequences, counts, strict=True):
            table, start = sequence.block_ids, sequence.num_computed
            last = -(-(start + count) // size)
            needed += max(0, last - len(table))
            for block_id in table[start // size : last]:
                holders = left.get(block_id, refs[block_id])
                if holders != 1 or cached[block_id]:
                    needed += 1
                    left[block_id] = holders - 1
        return needed

    def grow(self, sequence: Sequence, num_tokens: int, copies: Copies) -> None:
        """Make room for the next `num_tokens` tokens; every block that they touch is the sequence's own afterwards."""
        size, table, pool = self.block_size, sequence.block_ids, self.pool
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        for index in range(start // size, min(len(table), -(-end // size))):
            block_id = table[index]
            if pool.ref_counts[block_id] != 1 or pool.cached[block_id]:
                table[index] = pool.allocate()
                copies.append((block_id, table[index]))
                pool.release(block_id)
        while len(table) * size < end:
            table.append(pool.allocate())

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The pass has computed the next `num_tokens` tokens."""
        sequence.num_computed += num_tokens
        if sequence.num_computed >= sequence.commit_at:
            self._commit(sequence)
        live = sequence.request.live
        if len(live) > 1 and sequence is live[0]:
            for sibling in live:
                if sibling.num_computed < sibling.shared_tokens <= sequence.num_computed:
                    sibling.num_computed = sibling.shared_tokens

    def _commit(self, sequence: Sequence) -> None:
        """Offer the blocks that are now full and computed to the prefix cache."""
        cache, size = self.cache, self.block_size
        request = sequence.request
        assert cache is not None
        full = sequence.num_computed // size
        if request.beam is not None:  # beams come and go each step: only their prompt is worth keeping
            full = min(full, request.num_prompt_tokens // size)
        cache.extend_digests(sequence.digests, sequence.tokens, self._root(request), full)
        node = sequence.prefix_node
        assert node is not None
        for index in range(sequence.num_committed, full):
            tokens = sequence.tokens[index * size : (index + 1) * size].tobytes()
            node = cache.register(sequence.block_ids[index], sequence.digests[index], tokens, node)
        sequence.prefix_node = node
        sequence.num_committed = max(sequence.num_committed, full)
        sequence.commit_at = (full + 1) * size if sequence.num_computed < (full + 1) * size else NEVER

    # --- fork, roll-back, release ------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child hold all of its parent's blocks; whoever writes the last one first gets a copy."""
        for block_id in parent.block_ids:
            self.pool.share(block_id)
        child.block_ids = parent.block_ids[:]
        child.num_computed = parent.num_computed
        child.digests = parent.digests[:]
        child.num_committed = parent.num_committed
        child.prefix_node = parent.prefix_node
        child.commit_at = parent.commit_at

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` tokens: the rest is forgotten, and blocks beyond them are released.

        Blocks that a draft took and that stay empty go too.
        """
        if num_tokens < 1 or num_tokens > len(sequence.tokens):
            raise ValueError(f"cannot truncate {len(sequence.tokens)} tokens to {num_tokens}")
        size, table = self.block_size, sequence.block_ids
        del sequence.tokens[num_tokens:]
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        keep = -(-num_tokens // size)
        self.pool.release_table(table[keep:])
        del table[keep:]
        full = num_tokens // size
        del sequence.digests[full:]
        if sequence.num_committed > full:
            # Its node's ancestors lead back to the block that is still whole.
            node = sequence.prefix_node
            for _ in range(sequence.num_committed - full):
                assert node is not None
                node = node.parent
            sequence.prefix_node, sequence.num_committed = node, full
        if sequence.commit_at != NEVER:
            sequence.commit_at = (sequence.num_committed + 1) * size

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks that a refused draft took: the sequence keeps those that its tokens need."""
        keep = -(-len(sequence.tokens) // self.block_size)
        if len(sequence.block_ids) > keep:
            self.pool.release_table(sequence.block_ids[keep:])
            del sequence.block_ids[keep:]

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back; cached ones stay findable. The sequence is uncomputed afterwards."""
        self.pool.release_table(sequence.block_ids)
        sequence.block_ids = array("i")
        sequence.num_computed = sequence.num_committed = sequence.shared_tokens = 0
        sequence.prefix_node, sequence.commit_at = None, NEVER
        sequence.draft_token_ids, sequence.draft_distributions = [], None

    # --- swapping ----------------------------------------------------------------------------------------------

    def restore(self, request: Request, headroom: int) -> list[int] | None:
        """Give a swapped-out request blocks again, and plan the copies into them. Returns the slots that these read,
        or None where there is no room."""
        assert request.swapped is not None
        size = self.block_size
        holders = Counter(slot for _, slots in request.swapped for slot in slots)
        needed = len(holders) + sum(
            -(-len(sequence.tokens) // size) - len(slots)
            for sequence, (_, slots) in zip(request.live, request.swapped, strict=True)
        )
        if request.protected:
            needed = max(needed, request.max_blocks(size))
        if self.pool.num_free - needed < headroom + self.reserved:
            return None
        block_of = {slot: self.pool.allocate() for slot in holders}
        for slot, count in holders.items():
            for _ in range(count - 1):
                self.pool.share(block_of[slot])
        for sequence, (num_computed, slots) in zip(request.live, request.swapped, strict=True):
            table = array("i", [block_of[slot] for slot in slots])
            table.extend([self.pool.allocate() for _ in range(-(-len(sequence.tokens) // size) - len(table))])
            sequence.block_ids, sequence.num_computed = table, num_computed
            self._chain_from(sequence, [])  # its blocks are new ones: offer them again
        request.swapped = None
        self.moves += [SwapMove(False, block_id, slot) for slot, block_id in block_of.items()]
        return list(block_of)

    # --- figures -----------------------------------------------------------------------------------------------

    def outstanding(self, request: Request) -> int:
        """Blocks that the request may still ask for."""
        held = {block_id for sequence in request.live for block_id in sequence.block_ids}
        return max(0, request.max_blocks(self.block_size) - len(held))

    def check(self, requests: list[Request]) -> None:
        """Assert every invariant, given all requests that hold blocks."""
        self.pool.check(sequence.block_ids for request in requests for sequence in request.live)
        if self.cache is not None:
            self.cache.check()
        for request in requests:
            for sequence in request.live:
                if sequence.num_computed > min(len(sequence.tokens), len(sequence.block_ids) * self.block_size):
                    raise AssertionError(f"{sequence} has more computed tokens than room: {sequence.block_ids}")
