"""How many tokens to draft: what acceptance was measured to be, against what the larger step was measured to cost.

The goal is the least time a token on average over the batch's sequences: a step's predicted seconds times the sum of
1 / e, where a sequence is expected to go on by e tokens. A drafted token i places ahead counts with probability a^i,
where `a` is the chance that one is accepted. So drafts shorten, and stop, as the batch fills and steps are no longer
bound by memory; and a few sequences that draft well do not hold up the many that do not, as they would were it tokens
a second that counted: the batch is over with its slowest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from runtime.speculation.confidence import Calibration
from runtime.speculation.costs import StepCosts
from runtime.speculation.crowd import CROWD

# What is taken for granted before anything was measured, and how many tokens' worth it is.
_PRIOR, _PRIOR_WEIGHT = 0.6, 8.0
# How many tokens' worth the measure of all requests is to a new one.
_SHARED_WEIGHT = 12.0
_FORGET_ALL, _FORGET_ONE = 0.998, 0.95
# A gain smaller than this is not worth the risk of a wrong estimate. Where many sequences run estimates are worse, and
# there is less to gain.
_MARGIN, _MARGIN_OF_CROWD = 1.03, 1.12
# Who drafts nothing tries a single token so often (steps); and where all draft all the time, none does.
_PROBE_EVERY = 64
# A proposer that is not free tries more seldom the more is known of it, so many steps apart for each token that was
# decided on, within these bounds: a few refusals at the start are no reason to give up for hundreds of steps, and
# later, with many requests, some of them would try at every step.
_PAID_PROBES, _PAID_BOUNDS = 4, (16, 256)
# A try is as many times as seldom as a draft engine has to read so many tokens first (two layers of SmolLM2-135M read
# 500 in five of its steps).
_READ_FOR_A_TRY = 64
# A token that is as unlikely as this to count is left out.
_NEGLIGIBLE = 0.02
# What a round of a draft engine is taken to cost before one was measured, as a share of a step.
_HOPED_ROUND = 0.1
_TRIES = 4  # rounds before that
_NO_LIMIT = 2**30  # tokens


@dataclass(slots=True)
class Share:
    """Of the drafted tokens that were decided on, how many were accepted."""

    accepted: float = 0.0
    decided: float = 0.0

    def add(self, accepted: int, drafted: int, forget: float) -> None:
        # The tokens behind the first refusal were not decided on.
        self.accepted = self.accepted * forget + accepted
        self.decided = self.decided * forget + min(accepted + 1, drafted)


@dataclass(slots=True)
class Rounds:
    """Seconds of one round of a proposer. The first ones also pay for what is done once, so that the least of them
    counts."""

    seconds: float = 0.0
    tries: int = 0

    def observe(self, seconds: float) -> None:
        self.tries += 1
        if self.tries <= _TRIES:
            self.seconds = seconds if self.tries == 1 else min(self.seconds, seconds)
        else:
            self.seconds += 0.1 * (min(seconds, 2 * self.seconds) - self.seconds)


@dataclass(slots=True)
class Acceptance:
    """Of one sequence, by proposer."""

    shares: defaultdict[str, Share] = field(default_factory=lambda: defaultdict(Share))


class DraftLengths:
    """Chooses lengths for one engine. `max_length`: of a draft, in tokens."""

    def __init__(self, max_length: int, *, adaptive: bool = True):
        self.max_length = max_length
        self.adaptive = adaptive
        self.costs = StepCosts()
        self._all: defaultdict[tuple[str, int], Share] = defaultdict(Share)
        # Of the proposers that are not free, by how many sequences they draft for, in powers of two.
        self._rounds: dict[tuple[str, int], Rounds] = {}
        self._calibrations: defaultdict[str, Calibration] = defaultdict(Calibration)
        self._steps = 0

    # --- measurements ------------------------------------------------------------------------------------------

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step without prefill, drafting left out."""
        self.costs.observe(num_tokens, seconds)

    def observe_drafting(self, source: str, rounds: int, seconds: float, num_sequences: int = 1) -> None:
        """A proposer has drafted for so many sequences at once."""
        if rounds > 0:
            self._rounds.setdefault((source, num_sequences.bit_length()), Rounds()).observe(seconds / rounds)

    def observe_draft(self, own: Acceptance, source: str, level: int, accepted: int, drafted: int) -> None:
        """A draft was verified."""
        own.shares[source].add(accepted, drafted, _FORGET_ONE)
        self._all[source, level].add(accepted, drafted, _FORGET_ALL)

    def observe_confidences(self, source: str, confidences: Listed[float], accepted: int) -> None:
        """A draft whose tokens its proposer had these confidences in was verified."""
        self._calibrations[source].observe(confidences, accepted)

    def chance(self, own: Acceptance, source: str, level: int) -> float:
        """That a drafted token is accepted once those before it were: the sequence's own measure, held against that
        of all sequences at the same level."""
        shared, mine = self._all[source, level], own.shares[source]
        common = (shared.accepted + _PRIOR * _PRIOR_WEIGHT) / (shared.decided + _PRIOR_WEIGHT)
        return min(0.99, (mine.accepted + common * _SHARED_WEIGHT) / (mine.decided + _SHARED_WEIGHT))

    # --- choices -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._steps += 1

    def pays(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether drafts could pay at all beside `num_tokens` tokens, were they sure to be accepted."""
        if not self.adaptive:
            return True
        base, more = self.costs.predict(num_tokens), self.costs.predict(num_tokens + num_sequences)
        if base is None or more is None:
            return False
        return (num_tokens + num_sequences) / more > _margin(num_tokens) * num_tokens / base

    def rests(self, num_tokens: int) -> bool:
        """Whether to draft nothing for once, so that a plain step is measured again."""
        due = self._steps % _PROBE_EVERY == _PROBE_EVERY // 2 and self.costs.since_seen(num_tokens) > _PROBE_EVERY
        return self.adaptive and (due or self.costs.doubts(num_tokens))

    def most_beside(self, num_tokens: int, room: int, ratio: float) -> int:
        """How many tokens, at most `room`, a step may have beside `num_tokens` and take `ratio` of their time."""
        base = self.costs.predict(num_tokens)
        if base is None:
            return room
        sizes = range(num_tokens + 1, num_tokens + max(0, room) + 1)
        return bisect_right(sizes, ratio * base, key=lambda size: self.costs.predict(size) or 0.0)

    def choose(
        self,
        chances: Listed[float],
        most: Listed[int],
        num_tokens: int,
        source: str = "",
        room: int = _NO_LIMIT,
        behind: Listed[int] = (),
    ) -> list[int]:
        """Lengths for drafts with these chances and lengths at most, beside `num_tokens` tokens that are computed
        anyway, and `room` tokens in all. `source`: a proposer that is not free and has yet to draft, whose rounds
        count; `behind`: how many tokens of each sequence it has to compute first."""
        if not self.adaptive or not most:
            return list(most)
        base = self.costs.predict(num_tokens)
        if base is None:  # nothing is known yet: measure a plain step
            return [0] * len(most)
        gains = [
            (gain, -depth, index)
            for index, (chance, limit) in enumerate(zip(chances, most, strict=True))
            for depth, gain in enumerate(_gains(chance, limit), 1)
        ]
        if len(most) > 1:
            gains.sort(reverse=True)
        del gains[max(0, room) :]
        round_seconds = self._round_seconds(source, base, len(most)) if source else 0.0
        best, least = 0, base * num_tokens / _margin(num_tokens)
        waits, rounds, size = float(num_tokens), 0, num_tokens
        seconds = self.costs.table(num_tokens + len(gains))
        for gain, negative, _ in gains:
            waits -= gain
            size += 1
            if -negative > rounds:
                rounds = -negative
            cost = (seconds[size] + round_seconds * rounds) * waits
            if cost < least:
                best, least = size - num_tokens, cost
        lengths = [0] * len(most)
        for _, _, index in gains[:best]:
            lengths[index] += 1
        if 0 not in lengths:
            return lengths
        # Those who draft nothing try a token now and then: what was measured once need not hold for ever.
        every = self._probe_every(source)
        for index, limit in enumerate(most):
            seldom = 1 + behind[index] // _READ_FOR_A_TRY if behind else 1
            if not lengths[index] and limit and (self._steps + index) % (every * seldom) == 0:
                lengths[index] = 1
        return lengths

    def _probe_every(self, source: str) -> int:
        if not source:
            return _PROBE_EVERY
        known = sum(share.decided for (name, _), share in self._all.items() if name == source)
        return max(_PAID_BOUNDS[0], min(_PAID_BOUNDS[1], int(_PAID_PROBES * known)))

    def _round_seconds(self, source: str, base: float, num_sequences: int) -> float:
        """Of one round of a proposer for so many sequences, where a plain step takes `base`."""
        known = self._rounds.get((source, num_sequences.bit_length()))
        hoped = _HOPED_ROUND * base
        return hoped if known is None else known.seconds if known.tries >= _TRIES else min(hoped, known.seconds)

    def goes_on(self, confidences: Listed[float], most: int, num_tokens: int, num_sequences: int, source: str) -> bool:
        """Whether a draft with these confidences should go on: whether it would pay to, were the tokens that follow as
        sure as its last one. Beside `num_tokens` that are computed anyway; `num_sequences` draft as this one does."""
        if len(confidences) >= most:
            return False
        chances = self._calibrations[source].chances(confidences)
        drafted = len(chances)
        now = min(self._costs_by_length(chances, drafted, num_tokens, num_sequences, source))
        chance = chances[-1]
        last = chance / (chances[-2] if drafted > 1 else 1.0)
        seconds = self._seconds(num_tokens + num_sequences * most)
        round_seconds = self._round_seconds(source, seconds[num_tokens], num_sequences)
        others, expected = num_tokens - num_sequences, 1.0 + sum(chances)
        for length in range(drafted + 1, most + 1):
            chance *= last
            if chance <= _NEGLIGIBLE:
                break
            expected += chance
            step = seconds[num_tokens + num_sequences * length]
            if (step + length * round_seconds) * (others + num_sequences / expected) < now:
                return True
        return False

    def worth(self, confidences: Listed[float], num_tokens: int, num_sequences: int, source: str) -> int:
        """How many tokens of a draft that was made are worth verifying; arguments as of `goes_on`."""
        if self._steps % _PROBE_EVERY == 0:  # what is never verified is never known to be better than it seems
            return len(confidences)
        chances = self._calibrations[source].chances(confidences)
        costs = self._costs_by_length(chances, len(chances), num_tokens, num_sequences, source)
        return costs.index(min(costs))

    def _costs_by_length(
        self, chances: Listed[float], rounds: int, num_tokens: int, num_sequences: int, source: str
    ) -> list[float]:
        """Seconds a token, summed over sequences, where the first 0, 1, ... tokens of drafts are verified: a step's
        times the sum of 1 / e, of so many sequences that go on by e tokens and of those that go on by one."""
        size = num_tokens
        seconds = self._seconds(num_tokens + num_sequences * len(chances))
        drafting = rounds * self._round_seconds(source, seconds[size], num_sequences)
        others, expected = num_tokens - num_sequences, 1.0
        costs = [(seconds[size] + drafting) * num_tokens]
        for chance in chances:
            expected += chance
            size += num_sequences
            costs.append((seconds[size] + drafting) * (others + num_sequences / expected))
        return costs

    def _seconds(self, num_tokens: int) -> list[float]:
        """Of steps of 0, 1, ... tokens, of at least so many; 1.0 before the first measurement."""
        return self.costs.table(num_tokens) or [1.0] * (num_tokens + 1)


def _margin(num_tokens: int) -> float:
    return _MARGIN if num_tokens < CROWD else _MARGIN_OF_CROWD


def _gains(chance: float, limit: int) -> list[float]:
    """By how much each token of a draft of at most `limit` lowers 1 / e of its sequence; less and less."""
    expected, reached, gains = 1.0, 1.0, []
    for _ in range(limit):
        reached *= chance
        if reached <= _NEGLIGIBLE:
            break
        gains.append(reached / (expected * (expected + reached)))
        expected += reached
    return gains
