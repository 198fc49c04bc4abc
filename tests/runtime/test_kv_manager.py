"""Block tables: sharing, copy-on-write, roll-back, and how much memory sharing saves."""

from __future__ import annotations

from array import array

import pytest
from core_driver import Driver, make_core, make_request, run_alone

from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.scheduling.kv_manager import KvManager
from runtime.sequence import Request, Sequence

SIZE = 4


def sequence_of(num_tokens: int, *, kv: KvManager, computed: int | None = None, salt: str | None = None) -> Sequence:
    """A sequence of the tokens 0, 1, 2, ... with its blocks, computed so far."""
    message = make_request("r", list(range(num_tokens)), cache_salt=salt)
    request = Request(message, (0, 1), 1, num_tokens + 20)
    sequence = Sequence(request, 0, array("i", range(num_tokens)))
    request.live = request.sequences = [sequence]
    assert kv.acquire(request, 0)
    kv.advance(sequence, (num_tokens if computed is None else computed) - sequence.num_computed)
    return sequence


def test_fork_shares_all_blocks_and_copies_the_last_one_on_write() -> None:
    kv = KvManager(10, SIZE)
    parent = sequence_of(6, kv=kv)
    child = Sequence(parent.request, 1, parent.tokens[:])
    kv.fork(parent, child)
    assert child.block_ids == parent.block_ids
    assert kv.pool.num_used == 2
    copies: list[tuple[int, int]] = []
    assert kv.blocks_to_grow([child], [1]) == 1
    kv.grow(child, 1, copies)
    assert copies == [(parent.block_ids[1], child.block_ids[1])]
    assert child.block_ids[0] == parent.block_ids[0]
    assert kv.blocks_to_grow([parent], [1]) == 0, "the last holder writes in place"
    kv.grow(parent, 1, copies)
    assert len(copies) == 1
    kv.pool.check([parent.block_ids, child.block_ids])


def test_of_those_who_share_a_block_the_last_writer_needs_no_copy() -> None:
    """Counting a copy for each would call a request too big that fits: it would preempt itself for ever."""
    kv = KvManager(4, SIZE)
    parent = sequence_of(2, kv=kv)
    siblings = [parent] + [Sequence(parent.request, index, parent.tokens[:]) for index in range(1, 4)]
    for sibling in siblings[1:]:
        kv.fork(parent, sibling)
    assert kv.blocks_to_grow(siblings, [1] * 4) == 3 == kv.pool.num_free
    copies: list[tuple[int, int]] = []
    for sibling in siblings:
        kv.grow(sibling, 1, copies)
    assert len(copies) == 3
    kv.pool.check([sibling.block_ids for sibling in siblings])


def test_a_block_that_the_cache_knows_is_never_written() -> None:
    """Roll back into a full block: others may find it, so the writer gets a copy."""
    kv = KvManager(10, SIZE)
    sequence = sequence_of(9, kv=kv)
    kv.truncate(sequence, 6)
    full = sequence.block_ids[1]
    assert kv.pool.cached[full]
    copies: list[tuple[int, int]] = []
    assert kv.blocks_to_grow([sequence], [1]) == 1
    kv.grow(sequence, 1, copies)
    assert copies == [(full, sequence.block_ids[1])]
    other = sequence_of(9, kv=kv, computed=8)
    assert other.block_ids[1] == full
    kv.check([sequence.request, other.request])


@pytest.mark.parametrize("keep", range(1, 14))
def test_truncate_leaves_what_a_shorter_sequence_would_have(keep: int) -> None:
    kv = KvManager(10, SIZE)
    sequence = sequence_of(13, kv=kv)
    kv.truncate(sequence, keep)
    assert sequence.tokens.tolist() == list(range(keep))
    assert sequence.num_computed == keep
    assert len(sequence.block_ids) == -(-keep // SIZE)
    assert sequence.num_committed == keep // SIZE == len(sequence.digests)
    kv.check([sequence.request])
    # It goes on with other tokens, and they are found again under the right prefix.
    sequence.tokens.extend([77] * 10)
    kv.grow(sequence, 10, [])
    kv.advance(sequence, 10)
    kv.check([sequence.request])
    message = make_request("s", [*range(keep), *[77] * 10])
    again = Request(message, (0, 2), 1, 60)
    again.live = [Sequence(again, 0, array("i", message.prompt_token_ids))]
    assert kv.acquire(again, 0)
    assert again.live[0].num_computed == (keep + 9) // SIZE * SIZE


def test_truncate_refuses_nonsense() -> None:
    kv = KvManager(10, SIZE)
    sequence = sequence_of(6, kv=kv)
    for length in (0, 7):
        with pytest.raises(ValueError, match="cannot truncate 6 tokens"):
            kv.truncate(sequence, length)


def test_acquire_takes_nothing_when_it_fails() -> None:
    kv = KvManager(6, SIZE)
    first = sequence_of(9, kv=kv)
    kv.release(first)
    request = Request(make_request("r", list(range(40))), (0, 1), 1, 50)
    request.live = [Sequence(request, 0, array("i", range(40)))]
    assert not kv.acquire(request, 0)
    assert request.live[0].block_ids == array("i")
    kv.pool.check([])
    request.live[0].tokens = array("i", range(24))
    assert not kv.acquire(request, 1), "headroom is respected"
    assert kv.acquire(request, 0)
    assert request.live[0].num_computed == 8


def test_eight_samples_of_a_thousand_token_prompt_hold_one_prompt() -> None:
    """n = 8 on 1,000 tokens: one prompt's blocks plus each sample's own tail."""
    driver = Driver(make_core(600, block_size=16, max_context_len=1200, max_num_batched_tokens=512))
    prompt = [i % 50 for i in range(1000)]
    request = make_request("r", prompt, greedy=False, n=8, max_tokens=40, ignore_eos=True)
    driver.add(request)
    peak = 0
    while driver.core.has_work():
        driver.step()
        peak = max(peak, driver.core.kv.pool.num_used)
        report = driver.core.kv_report()
        if len(driver.core.requests) and len(driver.core.requests["r"].live) == 8:
            tails = 8 * (report.table_entries // 8 - 62)
            assert report.held_blocks <= 62 + tails
            assert report.saved > 0.8
    full_blocks, tail_blocks = 1000 // 16, -(-1039 // 16) - 1000 // 16
    assert peak == full_blocks + 8 * tail_blocks
    unshared = 8 * -(-1039 // 16)
    assert peak < 0.17 * unshared
    assert len(driver.answers["r"].tokens) == 8
    assert driver.answers["r"].tokens == run_alone(request, num_blocks=600, max_context_len=1200).tokens


def test_a_second_request_with_a_shared_prefix_computes_a_tenth() -> None:
    """1,000 shared tokens: at least 90 % of the second prompt comes out of the cache."""
    driver = Driver(make_core(300, block_size=16, max_context_len=1200, max_num_batched_tokens=256))
    shared = [i % 50 for i in range(1000)]
    computed = []
    for name, ending in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        request = make_request(name, shared + ending, max_tokens=5)
        driver.add(request)
        before = driver.core.executor.steps  # type: ignore[attr-defined]
        driver.run()
        computed.append(1003 - driver.answers[name].deltas[0].num_cached_tokens)
        assert driver.core.executor.steps > before  # type: ignore[attr-defined]
        assert driver.answers[name].tokens == run_alone(request, max_context_len=1200).tokens
    assert computed[1] <= 0.1 * computed[0]


def test_a_chat_reuses_its_whole_history() -> None:
    """Each turn's prompt is the last turn's prompt, its answer and a question: only the new part is computed."""
    driver = Driver(make_core(200, max_context_len=400))
    history = list(range(30))
    for turn in range(5):
        request = make_request(f"turn {turn}", history, max_tokens=21)
        driver.add(request)
        answer = driver.run()[request.request_id]
        if turn:
            assert answer.deltas[0].num_cached_tokens >= len(history) - 9 - 2 * SIZE
        assert answer.tokens == run_alone(request).tokens
        history = history + answer.tokens[0] + [40 + turn] * 9


def test_a_prefix_that_is_being_computed_is_picked_up_midway() -> None:
    """Two long prompts with a common prefix arrive together: the second takes over the blocks of the first."""
    driver = Driver(make_core(100, max_num_batched_tokens=16, max_prefill_chunk=8))
    prompt = [i % 50 for i in range(80)]
    requests = [make_request(name, [*prompt, end], max_tokens=3) for name, end in (("a", 1), ("b", 2))]
    driver.add(requests[0])
    driver.step()
    driver.add(requests[1])
    answers = driver.run()
    assert answers["b"].deltas[0].num_cached_tokens > 4
    for request in requests:
        assert answers[request.request_id].tokens == run_alone(request).tokens


def test_salts_do_not_share() -> None:
    driver = Driver(make_core())
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
        driver.add(make_request(name, list(range(20)), cache_salt=salt, max_tokens=2))
        driver.run()
    assert [driver.answers[name].deltas[0].num_cached_tokens for name in "abcd"] == [0, 0, 16, 0]


def test_the_pool_is_sized_from_memory_where_no_number_is_given() -> None:
    from tiny_model import HashModelExecutor

    executor = HashModelExecutor()
    limits = {"max_context_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    core = EngineCore(executor, EngineConfig(kv_cache_memory=executor.kv_layout.bytes_per_block * 9, **limits))
    assert core.kv.pool.num_blocks == executor.num_blocks == 9
    core = EngineCore(HashModelExecutor(), EngineConfig(**limits))
    assert core.kv.pool.num_blocks == 64, "no more than all sequences at full context can fill"
