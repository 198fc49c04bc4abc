"""How far to trust what a draft engine thinks of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence as Listed

# Confidences of like size share a measure; before much was measured, a confidence is believed.
_BUCKETS = 12
_BELIEF = 6.0  # tokens
_FORGET = 0.998


class Calibration:
    """The chance that a token is accepted, once those before it were, by the engine's confidence in it: the share that
    was, among tokens of like confidence."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _BUCKETS
        self._decided = [0.0] * _BUCKETS

    def observe(self, confidences: Listed[float], num_accepted: int) -> None:
        """Of a draft with these confidences, the first `num_accepted` tokens were accepted."""
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            at = _bucket(confidence)
            self._accepted[at] = self._accepted[at] * _FORGET + (position < num_accepted)
            self._decided[at] = self._decided[at] * _FORGET + 1.0

    def chance(self, confidence: float) -> float:
        at = _bucket(confidence)
        return min(0.99, (self._accepted[at] + _BELIEF * confidence) / (self._decided[at] + _BELIEF))

    def chances(self, confidences: Listed[float]) -> list[float]:
        """That each token of a draft is accepted, and those before it."""
        all_so_far, found = 1.0, []
        for confidence in confidences:
            all_so_far *= self.chance(confidence)
            found.append(all_so_far)
        return found


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))
