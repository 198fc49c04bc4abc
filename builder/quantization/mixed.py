"""Mixed precision: which weights get 8 bits where the rest has 4, under a bound on size or on quality.

Weights that share an input go together, since they are one merged product in the engine. They are ranked by what 8 bits
win: the fall of the relative error of their outputs on the calibration text, per bit that it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.errors import BuildError


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights that are widened together: their names, how many numbers they hold, bits of each, and the error won."""

    names: tuple[str, ...]
    size: int
    narrow_bits: float
    wide_bits: float
    gain: float

    @property
    def worth(self) -> float:
        return self.gain / ((self.wide_bits - self.narrow_bits) * self.size)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The most worthwhile first; equal ones in the model's order."""
    return sorted(candidates, key=lambda candidate: -candidate.worth)


def mean_bits(candidates: Sequence[Candidate], widened: set[str]) -> float:
    """Bits a weight on average, scales included."""
    total = sum(candidate.size for candidate in candidates)
    bits = sum(c.size * (c.wide_bits if c.names[0] in widened else c.narrow_bits) for c in candidates)
    return bits / total if total else 0.0


def within_bits(candidates: Sequence[Candidate], max_bits: float) -> set[str]:
    """Names to widen so that the mean stays within `max_bits`: as many of the most worthwhile as fit.

    Raises `BuildError` where not even the narrow weights do.
    """
    least = mean_bits(candidates, set())
    if least > max_bits:
        raise BuildError(
            f"weights.mixed.max_bits is {max_bits:g}, and int4 alone takes {least:.2f} bits a weight with its scales; "
            "raise it, or use larger groups"
        )
    widened: set[str] = set()
    for candidate in rank(candidates):
        if mean_bits(candidates, widened | set(candidate.names)) <= max_bits:
            widened |= set(candidate.names)
    return widened


def within_kl(
    candidates: Sequence[Candidate], max_kl: float, measure: Callable[[set[str]], float]
) -> tuple[set[str], float]:
    """The fewest of the most worthwhile names to widen so that `measure` (mean KL) is within `max_kl`, and its value.

    Found by bisection over the ranking, so `measure` is called about log2 times. Raises `BuildError` with the figure
    where even 8 bits throughout are not within the bound.
    """
    ranking = rank(candidates)

    def names(count: int) -> set[str]:
        return {name for candidate in ranking[:count] for name in candidate.names}

    best = measure(names(len(ranking)))
    if best > max_kl:
        raise BuildError(
            f"weights.mixed.max_kl is {max_kl:g}, and with every weight in 8 bits the mean KL on the calibration text "
            f"is {best:.3g}; raise it, or quantize embedding and head less (weights.skip)"
        )
    fails, holds = -1, len(ranking)
    while holds - fails > 1:
        middle = (fails + holds) // 2
        found = measure(names(middle))
        if found <= max_kl:
            holds, best = middle, found
        else:
            fails = middle
    return names(holds), best
