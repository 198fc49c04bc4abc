"""Draft lengths and what they are chosen by: measured step times, measured acceptance, the room in a step."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from core_driver import Driver, make_core, make_request
from drafters import ANY_DRAFTS, PartlyRight
from tiny_model import HashModelExecutor

from bench.fake_executor import SimulatedClock
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.errors import PlancastError
from runtime.executor import StepBatch
from runtime.sequence import Sequence
from runtime.speculation.confidence import Calibration
from runtime.speculation.config import SpeculationConfig, parse_speculation
from runtime.speculation.costs import StepCosts
from runtime.speculation.crowd import CROWD, CrowdDrafting
from runtime.speculation.length import Acceptance, DraftLengths
from runtime.speculation.proposer import Draft


def lengths_for(cost: dict[int, float], chance: float, sequences: int, most: int = 8) -> list[int]:
    lengths = DraftLengths(most)
    for size, seconds in cost.items():
        for _ in range(20):
            lengths.observe_step(size, seconds)
    lengths.begin_step()
    return lengths.choose([chance] * sequences, [most] * sequences, sequences)


MEMORY_BOUND = {1: 1.0, 2: 1.0, 4: 1.01, 8: 1.02, 16: 1.05}
COMPUTE_BOUND = {16: 16.0, 32: 32.0, 64: 64.0, 128: 128.0}


def test_free_rows_are_all_taken() -> None:
    assert lengths_for(MEMORY_BOUND, 0.9, 1) == [8]


def test_nothing_is_drafted_where_each_row_costs_its_share() -> None:
    assert lengths_for(COMPUTE_BOUND, 0.9, 16) == [0] * 16


def test_unlikely_drafts_are_shorter() -> None:
    steep = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.5, 7: 1.6, 8: 1.7, 10: 1.9}
    (sure,), (unsure,) = lengths_for(steep, 0.95, 1), lengths_for(steep, 0.4, 1)
    assert sure > unsure
    assert lengths_for(steep, 0.05, 1) == [0]


def test_who_has_much_to_read_first_is_tried_more_seldom() -> None:
    """Of 4096 steps in which a draft engine is not expected to pay, beside how many it is tried."""
    tries = []
    for behind in (1, 500):
        lengths = DraftLengths(8)
        for _ in range(20):
            lengths.observe_step(1, 1.0)
            lengths.observe_step(2, 2.0)
        drafted = 0
        for _ in range(4096):
            lengths.begin_step()
            (length,) = lengths.choose([0.1], [8], 1, "draft_model", behind=[behind])
            drafted += length
        tries.append(drafted)
    assert tries == [256, 32]


def test_a_few_that_draft_well_do_not_hold_up_the_many() -> None:
    """Twelve tokens more for three of sixteen sequences: more tokens a second, but all wait half as long again."""
    lengths = DraftLengths(4)
    for size, seconds in {16: 1.0, 19: 1.15, 22: 1.3, 28: 1.5}.items():
        for _ in range(20):
            lengths.observe_step(size, seconds)
    lengths.begin_step()
    assert lengths.choose([0.97] * 3, [4] * 3, 16) == [0] * 3
    assert min(lengths.choose([0.97] * 16, [4] * 16, 16)) >= 1  # where all of them draft as well it pays


def drafting_lengths() -> DraftLengths:
    """A row more costs a tenth of a step and a round of drafting a twentieth."""
    lengths = DraftLengths(8)
    for size in range(1, 9):
        for _ in range(20):
            lengths.observe_step(size, 0.9 + 0.1 * size)
    for _ in range(4):
        lengths.observe_drafting("eagle", 2, 0.1)
    lengths.begin_step()
    return lengths


def test_a_draft_goes_on_as_long_as_it_is_sure() -> None:
    lengths = drafting_lengths()
    assert lengths.goes_on([0.95], 8, 1, 1, "eagle")
    assert lengths.goes_on([0.95] * 4, 8, 1, 1, "eagle")
    assert not lengths.goes_on([0.1], 8, 1, 1, "eagle")
    assert not lengths.goes_on([0.95, 0.95, 0.05], 8, 1, 1, "eagle")
    assert not lengths.goes_on([0.95, 0.95], 2, 1, 1, "eagle"), "no longer than it may be"


def test_what_is_unlikely_is_not_verified() -> None:
    lengths = drafting_lengths()
    assert lengths.worth([0.9, 0.9, 0.02], 1, 1, "eagle") == 2
    assert lengths.worth([0.02, 0.9, 0.9], 1, 1, "eagle") == 0
    full = DraftLengths(8)
    for size, seconds in COMPUTE_BOUND.items():
        for _ in range(20):
            full.observe_step(size, seconds)
    full.begin_step()
    assert full.worth([0.5, 0.5], 16, 16, "eagle") == 0, "each row costs its share, and half of them count"


def test_confidence_is_held_against_what_was_accepted() -> None:
    calibration = Calibration()
    assert calibration.chance(0.3) == pytest.approx(0.3)
    for _ in range(50):
        calibration.observe([0.3, 0.9], 1)
    assert calibration.chance(0.3) > 0.85
    assert calibration.chance(0.9) < 0.2
    first, both = calibration.chances([0.3, 0.9])
    assert both == pytest.approx(first * calibration.chance(0.9))


def test_a_slow_first_time_is_not_believed() -> None:
    """The first pass of an engine, and the first step of a size, also read pages and make graphs."""
    lengths = DraftLengths(8)
    for _ in range(20):
        lengths.observe_step(1, 1.0)
    lengths.observe_drafting("eagle", 1, 3.0)
    lengths.observe_step(2, 2.5)
    lengths.begin_step()
    assert lengths.choose([0.6], [8], 1, "eagle") != [0]
    for _ in range(6):
        lengths.observe_drafting("eagle", 1, 3.0)
        lengths.begin_step()
    assert lengths.choose([0.6], [8], 1, "eagle") == [0], "but the fourth time is"


def test_a_few_refusals_are_no_reason_to_give_up() -> None:
    """A head that is right in half of the places may begin with a streak of wrong tokens: it is tried again soon, and
    more seldom the more is known against it."""
    lengths, own = drafting_lengths(), Acceptance()

    def tried(steps: int) -> int:
        count = 0
        for _ in range(steps):
            lengths.begin_step()
            count += bool(lengths.choose([lengths.chance(own, "eagle", 0)], [8], 1, "eagle")[0])
        return count

    for _ in range(4):
        lengths.observe_draft(own, "eagle", 0, 0, 1)
    assert tried(64) == 64
    for _ in range(6):
        lengths.observe_draft(own, "eagle", 0, 0, 1)
        lengths.observe_draft(Acceptance(), "eagle", 0, 0, 1)
    assert 2 <= tried(128) <= 8
    for _ in range(100):
        lengths.observe_draft(own, "eagle", 0, 0, 1)
    assert tried(512) == 2


def test_acceptance_of_one_sequence_and_of_all() -> None:
    lengths = DraftLengths(8)
    good, bad = Acceptance(), Acceptance()
    for _ in range(30):
        lengths.observe_draft(good, "ngram", 3, 8, 8)
        lengths.observe_draft(bad, "ngram", 3, 0, 8)
    assert lengths.chance(good, "ngram", 3) > 0.85
    assert lengths.chance(bad, "ngram", 3) < 0.4
    assert lengths.chance(bad, "ngram", 3) < lengths.chance(Acceptance(), "ngram", 3) < lengths.chance(good, "ngram", 3)


def test_costs_are_joined_and_rise() -> None:
    costs = StepCosts()
    assert costs.predict(3) is None
    for size, seconds in ((1, 1.0), (4, 2.0), (8, 1.8), (16, 4.0)):
        costs.observe(size, seconds)
    predicted = [costs.predict(size) for size in range(1, 40)]
    assert all(a is not None and b is not None and a <= b for a, b in itertools.pairwise(predicted))
    assert costs.predict(4) == costs.predict(8) == pytest.approx(1.9)
    assert costs.predict(12) == pytest.approx((1.9 + 4.0) / 2)


def test_a_crowd_is_not_hoped_to_grow_for_nothing() -> None:
    """Sixteen tokens took a third more than twelve: what more of them cost is guessed by that, not by a step of one."""
    costs = StepCosts()
    for size, seconds in {1: 1.0, 12: 1.5, 16: 2.0}.items():
        for _ in range(8):
            costs.observe(size, seconds)
    assert costs.predict(32) == pytest.approx(2.0 + 16 * 0.7 * 0.125)
    few = StepCosts()
    for size, seconds in {1: 1.0, 2: 1.4}.items():
        for _ in range(8):
            few.observe(size, seconds)
    assert few.predict(8) == pytest.approx(1.4 + 6 * 0.04)  # tried, whatever a second one cost


def test_one_slow_step_changes_little() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(4, 1.0)
    costs.observe(4, 100.0)
    assert costs.predict(4) == pytest.approx(1.0, rel=0.1)


def test_a_size_measured_in_a_slower_minute_is_measured_again() -> None:
    """While drafts are made, plain steps hardly ever run: what they cost before must not make drafts look free."""
    lengths = DraftLengths(8)
    costs = lengths.costs
    for _ in range(30):
        costs.observe(16, 1.5)
    assert not costs.doubts(16)
    for _ in range(30):
        costs.observe(20, 1.2)
    assert lengths.rests(16)
    plain = 0
    for _ in range(640):
        lengths.begin_step()
        resting = lengths.rests(16)
        plain += resting
        costs.observe(16 if resting else 20, 1.0 if resting else 1.2)
    assert plain <= 16
    assert costs.predict(16) == pytest.approx(1.0, rel=0.1)
    assert costs.predict(20) == pytest.approx(1.2, rel=0.05)


def test_all_sizes_become_slower_with_the_machine() -> None:
    costs = StepCosts()
    for _ in range(30):
        costs.observe(1, 1.0)
        costs.observe(4, 1.2)
    for _ in range(200):
        costs.observe(4, 2.4)
    assert costs.predict(1) == pytest.approx(2.0, rel=0.15)


def test_sizes_between_two_that_are_known_agree_with_both() -> None:
    costs = StepCosts()
    for _ in range(40):
        costs.observe(16, 16.0)
    for _ in range(60):
        for size in (17, 18, 20):
            costs.observe(size, float(size))
    for size in range(16, 21):
        assert costs.predict(size) == pytest.approx(size, rel=0.03)


class TimedExecutor(HashModelExecutor):
    """Says the next number each time. A step takes simulated time: bound by memory up to 8 tokens, then not."""

    def __init__(self, clock: SimulatedClock, a_token: float = 0.00044):
        super().__init__(5, num_blocks=2000, block_size=16)
        self._clock, self._a_token = clock, a_token

    def run(self, batch: StepBatch) -> np.ndarray:
        self._clock.wait(0.006 + self._a_token * max(0, len(batch.token_ids) - 8))
        logits = np.zeros((len(batch.logits_rows), 5), np.float32)
        logits[np.arange(len(logits)), (batch.token_ids[batch.logits_rows] + 1) % 5] = 9.0
        return logits


@pytest.mark.parametrize(("requests", "share"), [(1, 1.0), (16, 0.2)])
def test_many_are_looked_at_seldom_once_it_was_in_vain(requests: int, share: float) -> None:
    """Always wrong drafts: a crowd is asked in few of the steps, one request in each."""
    asked: list[int] = []

    class Wrong(PartlyRight):
        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
            asked.append(len(wanted))
            return super().propose(wanted)

    clock = SimulatedClock()
    speculation = msgspec.structs.replace(ANY_DRAFTS, adaptive=True)
    config = EngineConfig(max_context_len=512, max_num_seqs=64, max_num_batched_tokens=512, speculation=speculation)
    core = EngineCore(TimedExecutor(clock), config, draft_engine=Wrong(lambda s: [0] * 300, 5, right=0.0), clock=clock)
    for i in range(requests):
        core.add_request(make_request(f"r{i}", [i % 5], max_tokens=200))
    steps = 0
    while core.has_work():
        core.step()
        steps += 1
    assert 0.05 * steps < len(asked) <= share * steps


def simulated_seconds(
    requests: int, right: float | None, kind: type[PartlyRight] = PartlyRight, a_token: float = 0.00044
) -> float:
    """Of so many requests; `right`: the share of drafted tokens that is right, None: no drafts."""
    clock = SimulatedClock()
    config = EngineConfig(max_context_len=512, max_num_seqs=64, max_num_batched_tokens=512)
    drafter = None
    if right is not None:
        speculation = msgspec.structs.replace(ANY_DRAFTS, adaptive=True, num_speculative_tokens=8)
        config = msgspec.structs.replace(config, speculation=speculation)
        drafter = kind(
            lambda s: [(s.request.message.prompt_token_ids[-1] + 1 + i) % 5 for i in range(300)], 5, right=right, seed=1
        )
    core = EngineCore(TimedExecutor(clock, a_token), config, draft_engine=drafter, clock=clock)
    for i in range(requests):
        core.add_request(make_request(f"r{i}", [i % 5], max_tokens=200))
    while core.has_work():
        core.step()
    return clock()


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
def test_speculation_pays_or_switches_itself_off(requests: int, right: float) -> None:
    """Never more than 3 % slower than plain decoding, at any load and acceptance; far faster where it can be."""
    speedup = simulated_seconds(requests, None) / simulated_seconds(requests, right)
    assert speedup > (0.985 if requests >= CROWD else 0.97)
    if requests == 1 and right == 0.9:
        assert speedup > 3


def test_what_a_crowd_may_lose_is_bounded_whatever_it_is_told() -> None:
    """Every look that may be taken is taken, and loses a fifth of a step."""
    crowd, lost = CrowdDrafting(), 0.0
    for _ in range(2000):
        if crowd.looks():
            crowd.settle(-0.2, drafted=True)
            lost += 0.2
        else:
            crowd.passed()
    assert 10 < lost < 2000 * 0.01 + 1.2


def test_a_crowd_that_saves_looks_at_every_step() -> None:
    crowd = CrowdDrafting()
    for _ in range(100):
        assert crowd.looks()
        crowd.settle(0.3, drafted=True)
    assert crowd.balance == pytest.approx(4.0, abs=0.1), "what was saved long ago does not count for ever"
    crowd.settle(-0.1, drafted=True)
    assert crowd.looks(), "chance, among so many that saved"
    crowd.settle(-0.01, drafted=False)
    assert not crowd.looks()
    assert crowd.looks(after=4)


def test_estimates_that_are_wrong_again_and_again_cost_a_crowd_little() -> None:
    """Drafts are right for twenty looks, so that they are believed in, and then wrong for as many."""

    class Treacherous(PartlyRight):
        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
            self._right = 1.0 if len(asked) // 20 % 2 == 0 else 0.0
            asked.append(len(wanted))
            return super().propose(wanted)

    asked: list[int] = []
    plain = simulated_seconds(16, None, a_token=0.0002)
    assert plain / simulated_seconds(16, 1.0, Treacherous, a_token=0.0002) > 0.985
    assert len(asked) > 20, "it was looked again once they were wrong"


def test_all_that_were_drafted_for_give_way() -> None:
    """Drafts were looked for, and then no sequence decodes, since one that matters more needs all places."""
    drafter = PartlyRight(lambda sequence: [0] * 200, 50)
    adaptive = msgspec.structs.replace(ANY_DRAFTS, adaptive=True)
    core = make_core(
        16, block_size=1, drafter=drafter, speculation=adaptive, scheduling_policy="priority", max_num_seqs=4
    )
    driver = Driver(core)
    driver.add(make_request("first", [1], max_tokens=4, priority=1))
    for _ in range(2):
        driver.step()
    driver.add(make_request("urgent", [2], max_tokens=1, priority=0, n=4, greedy=False, seed=1))
    driver.run()
    assert core.stats().preemptions == 1
    assert {name: answer.finished for name, answer in driver.answers.items()} == {"first": True, "urgent": True}


def test_drafts_take_no_room_from_a_prompt() -> None:
    """A request that waits for its turn is read as soon as without drafts."""
    drafter = PartlyRight(lambda sequence: [0] * 200, 50, right=0.0)
    driver = Driver(make_core(drafter=drafter, max_num_batched_tokens=8, max_num_seqs=8))
    for i in range(4):
        driver.add(make_request(f"busy{i}", [1, 2], max_tokens=40))
    for _ in range(8):
        driver.step()
    driver.add(make_request("late", [3, 4, 5, 6], max_tokens=4))
    driver.step()
    assert driver.answers["late"].tokens[0]
    driver.run()


def test_drafts_preempt_nobody() -> None:
    """Where blocks are short the drafts go, not a request."""
    counts = []
    for drafter in (None, PartlyRight(lambda sequence: [0] * 200, 50, right=0.0)):
        driver = Driver(make_core(num_blocks=10, drafter=drafter, max_num_batched_tokens=64))
        for i in range(3):
            driver.add(make_request(f"r{i}", [i + 1] * 4, max_tokens=8))
        driver.run()
        counts.append(driver.core.stats().preemptions)
    assert counts == [0, 0]


def test_a_request_may_do_without() -> None:
    drafter = PartlyRight(lambda sequence: [0] * 200, 50)
    driver = Driver(make_core(drafter=drafter))
    driver.add(make_request("r", [1, 2, 3], max_tokens=20, speculation=False))
    driver.run()
    assert driver.core.stats().spec_decode_num_drafts == 0


def test_switched_while_it_runs() -> None:
    drafter = PartlyRight(lambda sequence: [0] * 200, 50)
    core = make_core(drafter=drafter, speculation=ANY_DRAFTS)
    driver = Driver(core)
    assert core.set_speculation(False) is True
    driver.add(make_request("r", [1, 2, 3], max_tokens=20))
    for _ in range(5):
        driver.step()
    assert core.stats().spec_decode_num_drafts == 0
    assert core.set_speculation(True) is False
    driver.run()
    assert core.stats().spec_decode_num_drafts > 0
    with pytest.raises(PlancastError, match="speculative-config"):
        make_core().set_speculation(True)


@pytest.mark.parametrize(
    ("value", "method"),
    [
        ("ngram", ("ngram",)),
        ("off", ()),
        (False, ()),
        ("ngram+suffix", ("ngram", "suffix")),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}', ("ngram",)),
        ({"model": "artifacts/draft", "num_speculative_tokens": 4}, ("draft_model",)),
        ({"method": ["suffix", "draft_model"], "model": "d"}, ("suffix", "draft_model")),
    ],
)
def test_configs_as_callers_write_them(value: object, method: tuple[str, ...]) -> None:
    assert parse_speculation(value).method == method


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eagle9", "eagle9.*ngram"),
        ("{", "no valid JSON"),
        ({"num_speculative_tokens": 3}, "give a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}, "prompt_lookup_min 9"),
        ({"method": "draft_model"}, "needs `model`"),
        ({"method": "ngram", "model": "x"}, "does not name draft_model"),
        ({"method": "ngram", "lookahead": 3}, "unknown key 'lookahead'"),
        ({"method": ["ngram", "ngram"]}, "twice"),
        (3, "neither"),
    ],
)
def test_bad_configs_are_refused(value: object, words: str) -> None:
    with pytest.raises(PlancastError, match=words):
        parse_speculation(value)


def test_adaptive_config_is_the_default() -> None:
    assert SpeculationConfig().adaptive
    assert not SpeculationConfig().is_on
