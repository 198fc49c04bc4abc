"""Service levels: how many prefill tokens a step can take without holding up the decodes, and who got what they asked.

TTFT is the time from arrival to the first token, TPOT the mean time between a request's tokens after it, in seconds.
"""

from __future__ import annotations

from runtime.sequence import Request

# How fast old steps are forgotten: a weight of 1/e after 200 steps.
FORGETTING = 0.995
# The model aims this far below the limit, since steps scatter around their mean.
SAFETY = 0.9
# A step this many times slower than predicted was held up by something else (a page fault, another process).
OUTLIER = 4.0
_WARM_UP = 8


class StepTimeModel:
    """Predicts a step's seconds as `base + per_decode * decode sequences + per_token * prefill tokens`.

    Weighted least squares with exponential forgetting and a little ridge, over the steps measured so far.
    """

    def __init__(self) -> None:
        self.base = self.per_decode = self.per_token = 0.0
        self.steps = 0
        self._outliers = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if self.steps >= _WARM_UP and seconds > OUTLIER * self.predict(num_decodes, num_prefill_tokens):
            self._outliers += 1
            if self._outliers < _WARM_UP:  # a lasting change is no outlier
                return
        else:
            self._outliers = 0
        self.steps += 1
        features = (1.0, float(num_decodes), float(num_prefill_tokens))
        for i, row in enumerate(self._products):
            self._targets[i] = FORGETTING * self._targets[i] + features[i] * seconds
            for j in range(3):
                row[j] = FORGETTING * row[j] + features[i] * features[j]
        self._fit()

    def _fit(self) -> None:
        ridge = (1e-9, 1e-3, 1e-3)
        a = [row[:] for row in self._products]
        for i, little in enumerate(ridge):
            a[i][i] += little
        solution = _solve3(a, self._targets)
        if solution is not None:
            self.base, self.per_decode, self.per_token = (max(0.0, value) for value in solution)

    def predict(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """Seconds that such a step should take."""
        return self.base + self.per_decode * num_decodes + self.per_token * num_prefill_tokens

    def prefill_budget(self, num_decodes: int, limit: float, most: int, least: int) -> int:
        """Prefill tokens, `least` to `most`, with which a step of so many decodes stays within `limit` seconds.

        `least` keeps prefills going when even the decodes alone are over the limit.
        """
        if self.steps < _WARM_UP or self.per_token <= 0.0:
            return min(most, max(least, most // 4 if self.steps < _WARM_UP else most))
        room = (limit * SAFETY - self.predict(num_decodes, 0)) / self.per_token
        return min(most, max(least, int(room)))


def _solve3(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Solve a symmetric positive 3x3 system by Cholesky; None where it is singular."""
    l00 = a[0][0] ** 0.5
    if l00 == 0.0:
        return None
    l10, l20 = a[1][0] / l00, a[2][0] / l00
    d1 = a[1][1] - l10 * l10
    if d1 <= 0.0:
        return None
    l11 = d1**0.5
    l21 = (a[2][1] - l20 * l10) / l11
    d2 = a[2][2] - l20 * l20 - l21 * l21
    if d2 <= 0.0:
        return None
    l22 = d2**0.5
    y0 = b[0] / l00
    y1 = (b[1] - l10 * y0) / l11
    y2 = (b[2] - l20 * y0 - l21 * y1) / l22
    x2 = y2 / l22
    x1 = (y1 - l21 * x2) / l11
    return [(y0 - l10 * x1 - l20 * x2) / l00, x1, x2]


class Goodput:
    """Counts finished requests that met both limits (None: no limit)."""

    def __init__(self, ttft_slo: float | None, tpot_slo: float | None):
        self.ttft_slo, self.tpot_slo = ttft_slo, tpot_slo
        self.finished = self.good = self.good_tokens = 0

    def count(self, request: Request) -> None:
        """A request finished; its times say how well it was served."""
        self.finished += 1
        first, last = request.first_token_time, request.last_token_time
        if first is None or last is None:
            return
        longest = max((sequence.num_output_tokens for sequence in request.sequences), default=0)
        if self.ttft_slo is not None and first - request.arrival_time > self.ttft_slo:
            return
        if self.tpot_slo is not None and longest > 1 and (last - first) / (longest - 1) > self.tpot_slo:
            return
        self.good += 1
        self.good_tokens += sum(sequence.num_output_tokens for sequence in request.sequences)
