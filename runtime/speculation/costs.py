"""What a step costs by the number of its tokens, learnt from the steps that run."""

from __future__ import annotations

from bisect import bisect_left

# A new measurement's weight, and that of one of a size that was not seen for some steps, or for many; the outliers of a
# busy machine are cut to so many times the mean first.
_WEIGHT, _SELDOM, _LONG_AGO = 0.12, (8, 0.3), (500, 0.5)
OUTLIER = 1.6
# The machine's speed changes from minute to minute, and with it what every size costs: what a step of a size that was
# measured so often took longer than its mean is taken to hold for all sizes, with that weight, and a little for its own
# alone.
_KNOWN_WELL, _DRIFT, _OWN = 24, 0.1, 0.03
# It is noticed once it adds up to so much: predictions are not made anew for less.
_NOTICED = 0.01
# A size that seems to cost so much more than a larger one was measured in other times: it is to be measured again, but
# not at every step.
_DOUBT, _PATIENCE = 1.02, 8
# The first measurements of a size also pay for what is done once (pages, caches, a graph for a new shape): until there
# are so many, the least of them counts, and only then is a larger size held to be slower than hoped.
_TRIES = 4
# What a token more is taken to cost where no larger step was measured yet, as a share of a step of one: hopeful, so
# that larger steps are tried and measured.
_HOPE = 0.04
# From so many tokens on arithmetic counts: beyond them a token more is hoped to cost so much of what the last ones did.
_CROWDED, _HOPE_OF_SLOPE = 12, 0.7
# Sizes that were not seen for so many steps are forgotten, and so tried again.
_STALE = 4000
# Predictions are made for so many sizes at least.
_AT_ONCE = 16
# Kernels take rows in tiles: a row more than whole ones costs as much as many.
_ANCHORS = (*range(1, 33), 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)


class StepCosts:
    """Mean seconds of a step at some sizes (tokens), joined by lines; never less for a larger step."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._predicted: list[float] = []  # by number of tokens: asked many times between two steps
        self._seen_at: dict[int, int] = {}
        self._tries: dict[int, int] = {}
        self._drifted = 0.0
        self.steps = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens took `seconds`."""
        self.steps += 1
        size = _anchor(num_tokens)
        seconds *= size / num_tokens if num_tokens > size else 1.0
        mean = self._seconds.get(size)
        tries = self._tries[size] = self._tries.get(size, 0) + 1
        changed = True
        if mean is None or tries < _TRIES:
            self._seconds[size] = min(seconds, mean or seconds)
        else:
            expected = self._expected(num_tokens, size)
            off = min(seconds, OUTLIER * expected) / expected - 1.0
            weight = self._weight(size)
            self._seconds[size] *= 1.0 + weight * off
            if tries > _KNOWN_WELL:
                self._drifted += _DRIFT * off
                changed = weight != _OWN or abs(self._drifted) >= _NOTICED
            if changed:
                for other in self._seconds:
                    self._seconds[other] *= 1.0 + self._drifted
                self._drifted = 0.0
        self._seen_at[size] = self.steps
        if self.steps % _STALE == 0:
            for old in [other for other, seen in self._seen_at.items() if self.steps - seen > _STALE]:
                del self._seconds[old], self._seen_at[old], self._tries[old]
                changed = True
        if changed:
            self._predicted = []

    def _expected(self, num_tokens: int, size: int) -> float:
        """Seconds of a step of so many tokens by the means of the size that stands for them and of the next smaller."""
        mean = self._seconds[size]
        before = 0 if num_tokens >= size else max((other for other in self._seconds if other < size), default=0)
        if not before:
            return mean
        less = self._seconds[before]
        return less + (mean - less) * (num_tokens - before) / (size - before)

    def _weight(self, size: int) -> float:
        since = self.steps - self._seen_at[size]
        for steps, weight in (_LONG_AGO, _SELDOM):
            if since >= steps:
                return weight
        return _OWN if self._tries[size] > _KNOWN_WELL else _WEIGHT

    def predict(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None before the first measurement."""
        if num_tokens < len(self._predicted):
            return self._predicted[num_tokens]
        return self.table(num_tokens)[num_tokens] if self._seconds else None

    def table(self, num_tokens: int) -> list[float]:
        """Seconds of steps of 0, 1, ... tokens, of at least so many; empty before the first measurement."""
        if num_tokens >= len(self._predicted) and self._seconds:
            self._predicted = self._predict(max(num_tokens, _AT_ONCE))
        return self._predicted

    def _predict(self, num_tokens: int) -> list[float]:
        (size, seconds), *others = curve = self._joined()
        found = [seconds] * (size + 1)
        before = less = 0.0
        for larger, more in others:
            before, less = size, seconds
            if larger > size + 1:
                slope = (more - seconds) / (larger - size)
                found += [seconds + slope * i for i in range(1, larger - size)]
            found.append(more)
            size, seconds = larger, more
        if num_tokens > size:
            slope = _HOPE * curve[0][1]
            if size > _CROWDED and others:
                slope = max(slope, _HOPE_OF_SLOPE * (seconds - less) / (size - before))
            found += [seconds + slope * i for i in range(1, num_tokens - size + 1)]
        return found

    def since_seen(self, num_tokens: int) -> int:
        """Steps since one of about this size was measured."""
        return self.steps - self._seen_at.get(_anchor(num_tokens), -(10**9))

    def doubts(self, num_tokens: int) -> bool:
        """Whether what is known of steps of about this size contradicts what is known of larger ones."""
        size = _anchor(num_tokens)
        known = self._seconds.get(size)
        if known is None or self.since_seen(num_tokens) < _PATIENCE:
            return False
        for larger, seconds in self._seconds.items():
            if larger > size and known > _DOUBT * seconds and self._tries[larger] >= _TRIES:
                return True
        return False

    def _joined(self) -> list[tuple[int, float]]:
        """Sizes ascending with seconds not descending: neighbours that contradict the order are pooled (isotonic
        regression, pool adjacent violators)."""
        tries = self._tries
        known = [item for item in self._seconds.items() if tries[item[0]] >= _TRIES]
        known = sorted(known or self._seconds.items())
        seconds = [each for _, each in known]
        if seconds == sorted(seconds):
            return known
        pools: list[list[float]] = []  # mean, and of how many sizes
        for each in seconds:
            pools.append([each, 1.0])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight = pools.pop()
                above = pools[-1]
                above[0] = (above[0] * above[1] + mean * weight) / (above[1] + weight)
                above[1] += weight
        pooled = [mean for mean, weight in pools for _ in range(int(weight))]
        return [(size, mean) for (size, _), mean in zip(known, pooled, strict=True)]


def _anchor(num_tokens: int) -> int:
    """The size that stands for so many tokens."""
    return _ANCHORS[min(bisect_left(_ANCHORS, num_tokens), len(_ANCHORS) - 1)]
