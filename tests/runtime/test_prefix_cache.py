"""The prefix cache: what is found again, and above all what is not."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from core_driver import Driver, make_core, make_request, run_alone
from hypothesis import given, settings

from runtime.block_pool import BlockPool
from runtime.prefix_cache import CachedBlock, PrefixCache, blake2b_16

SIZE = 4


def make(num_blocks: int = 16, digest=blake2b_16) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(SIZE, pool, digest)


def register(cache: PrefixCache, tokens: list[int], root: CachedBlock) -> list[int]:
    """Compute and release a sequence: its full blocks become findable."""
    ids, digests, node, table = array("i", tokens), [], root, []
    cache.extend_digests(digests, ids, root, len(tokens) // SIZE)
    for index, digest in enumerate(digests):
        table.append(cache.pool.allocate())
        node = cache.register(table[-1], digest, ids[index * SIZE : (index + 1) * SIZE].tobytes(), node)
    cache.pool.release_table(table)
    cache.check()
    return table


def match(cache: PrefixCache, tokens: list[int], root: CachedBlock) -> list[int]:
    """The blocks found for a prompt, as the scheduler asks: the last token is never among them."""
    found = cache.match(array("i", tokens), [], root, (len(tokens) - 1) // SIZE)
    return [node.block_id for node in found]


def test_full_blocks_of_a_common_prefix_are_found() -> None:
    _, cache = make()
    root = cache.root()
    table = register(cache, list(range(10)), root)
    assert len(table) == 2  # the third block is not full
    assert match(cache, list(range(10)), root) == table
    assert match(cache, [*range(8), 99, 98], root) == table
    assert match(cache, [*range(7), 99, 98], root) == table[:1]
    assert match(cache, [99, *range(1, 10)], root) == []
    assert match(cache, list(range(8)), root) == table[:1], "the last prompt token is always computed"


def test_case_12_no_stale_block_at_the_edge() -> None:
    """`[10]*15 + [28]`, then `[10]*15 + [11]`: the full block differs in its last token alone."""
    pool = BlockPool(8)
    cache = PrefixCache(16, pool)
    root, digests = cache.root(), []
    first = array("i", [10] * 15 + [28])
    cache.extend_digests(digests, first, root, 1)
    block_id = pool.allocate()
    cache.register(block_id, digests[0], first.tobytes(), root)
    assert cache.match(array("i", [10] * 15 + [11, 1]), [], root, 1) == []
    assert [node.block_id for node in cache.match(array("i", [10] * 15 + [28, 1]), [], root, 1)] == [block_id]


@pytest.mark.parametrize("block_size", [4, 15, 16])
@pytest.mark.parametrize("model", ["hash", "tiny"])
def test_case_12_through_the_core(model: str, block_size: int) -> None:
    driver = Driver(make_core(model=model, block_size=block_size))
    for name, last in (("a", 28), ("b", 11), ("c", 28)):
        request = make_request(name, [10] * 15 + [last], max_tokens=12)
        driver.add(request)
        assert driver.run()[name].tokens == run_alone(request, model=model, block_size=block_size).tokens
    assert driver.answers["c"].deltas[0].num_cached_tokens == 15 // block_size * block_size


@pytest.mark.parametrize("model", ["hash", "tiny"])
def test_case_10_the_same_prompt_twice(model: str) -> None:
    driver = Driver(make_core(model=model))
    for name in "ab":
        driver.add(make_request(name, list(range(20)), max_tokens=20))
        driver.run()
    assert driver.answers["a"].tokens == driver.answers["b"].tokens
    assert driver.answers["b"].deltas[0].num_cached_tokens == 16


@pytest.mark.parametrize("digest", [lambda data: b"same", lambda data: bytes([sum(data) % 3])])
def test_a_colliding_digest_never_serves_other_tokens(digest) -> None:
    """Whatever the digest, tokens and ancestors are compared."""
    _, cache = make(64, digest)
    root = cache.root()
    known = {}
    for tokens in ([1] * 9, [2] * 9, [1] * 4 + [2] * 5, [2] * 4 + [1] * 5):
        for index, block_id in enumerate(register(cache, tokens, root)):
            known[block_id] = tuple(tokens[: (index + 1) * SIZE])
    for tokens in ([1] * 13, [2] * 13, [1] * 4 + [2] * 9, [2] * 4 + [1] * 9, [3] * 13):
        for index, block_id in enumerate(match(cache, tokens, root)):
            assert known[block_id] == tuple(tokens[: (index + 1) * SIZE])


def test_extras_keep_prompts_apart() -> None:
    _, cache = make()
    plain, salted = cache.root(), cache.root((("cache_salt", "a"),))
    register(cache, list(range(9)), plain)
    assert match(cache, list(range(9)), salted) == []
    table = register(cache, list(range(9)), salted)
    assert match(cache, list(range(9)), cache.root((("cache_salt", "a"),))) == table
    # Tags and values cannot be shifted into each other.
    for other in ((("cache_salt", "b"),), (("cache_sal", "ta"),), (("adapter", "a"),), (("cache_salt", ""),)):
        assert match(cache, list(range(9)), cache.root(other)) == []
    both = (("adapter", "x"), ("cache_salt", "a"))
    assert cache.root(both).digest == cache.root(both[::-1]).digest != salted.digest


def test_an_evicted_parent_hides_its_children_until_it_is_back() -> None:
    pool, cache = make()
    root = cache.root()
    table = register(cache, list(range(12)), root)
    cache.evict(table[0])
    pool.unmark_cached(table[0])
    cache.check()
    assert match(cache, list(range(13)), root) == []
    (again,) = register(cache, list(range(4)), root)
    assert match(cache, list(range(13)), root) == [again, *table[1:]]


def test_reset_forgets_everything_and_frees_idle_blocks() -> None:
    pool, cache = make()
    register(cache, list(range(12)), cache.root())
    cache.reset()
    cache.check()
    pool.check([])
    assert (len(cache), pool.num_idle, pool.num_free) == (0, 0, 16)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12),
    num_blocks=st.integers(6, 20),
    weak=st.booleans(),
)
def test_what_is_found_holds_these_tokens(texts: list[list[int]], num_blocks: int, weak: bool) -> None:
    """Against a model that remembers each block's whole prefix, with evictions, and with 2-bit digests."""
    pool, cache = make(num_blocks, (lambda data: bytes([blake2b_16(data)[0] & 3])) if weak else blake2b_16)
    root = cache.root()
    holds: dict[int, tuple[int, ...]] = {}
    for text in texts:
        ids, digests = array("i", text), []
        found = cache.match(ids, digests, root, len(text) // SIZE)
        for index, node in enumerate(found):
            assert holds[node.block_id] == tuple(text[: (index + 1) * SIZE])
            pool.share(node.block_id)
        table, node = [node.block_id for node in found], found[-1] if found else root
        for index in range(len(found), len(text) // SIZE):
            block_id = pool.allocate()
            holds[block_id] = tuple(text[: (index + 1) * SIZE])
            node = cache.register(block_id, digests[index], ids[index * SIZE : (index + 1) * SIZE].tobytes(), node)
            table.append(block_id)
        cache.check()
        pool.check([table])
        pool.release_table(table)
