"""The protocol of whatever drafts tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtime.sequence import Sequence

# What a token was drawn from: ids i64 [K] ascending, and their probabilities f64 [K].
Distribution = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a sequence's own.

    `distributions`: what each was drawn from; None where each was certain before any random number was drawn (a point
    mass), as those of a look-up or of an argmax are. `level`: how sure the proposer is, a small number that groups
    drafts with a like chance of being accepted. `confidences`: the proposer's own probability of each token once those
    before it are right, where it has one.
    """

    token_ids: list[int]
    distributions: list[Distribution] | None = None
    source: str = ""
    level: int = 0
    confidences: list[float] | None = None

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.token_ids[length:]
        if self.distributions is not None:
            del self.distributions[length:]
        if self.confidences is not None:
            del self.confidences[length:]


@runtime_checkable
class HiddenReader(Protocol):
    """A proposer that drafts from the target's hidden states."""

    def take_hidden(
        self, hidden: NDArray[np.float32], sequences: Listed[Sequence], rows: Listed[int], counts: Listed[int]
    ) -> None:
        """The states [R, H] of a step, to keep: each sequence's new tokens, about to be appended, `counts` of them,
        were read off the rows from its entry of `rows` on."""
        ...


# Told the confidences of a draft's tokens so far: whether another one would pay.
GoesOn = Callable[[Listed[float]], bool]


@runtime_checkable
class ConfidentProposer(Protocol):
    """A proposer that knows how sure it is of each token, and can stop where it is not sure enough."""

    def propose_while(self, wanted: Listed[tuple[Sequence, int]], goes_on: GoesOn) -> list[Draft | None]:
        """As `Proposer.propose`; a draft whose tokens have confidences ends where `goes_on` says so."""
        ...

    def num_behind(self, sequence: Sequence) -> int:
        """Tokens of the sequence that it has to compute before it drafts."""
        ...


class Proposer(Protocol):
    """Drafts for sequences whose last token is the only one not computed yet.

    `is_free`: drafting costs next to nothing, so that a draft may be made first and cut afterwards.
    """

    name: str
    is_free: bool

    def propose(self, wanted: Listed[tuple[Sequence, int]]) -> list[Draft | None]:
        """For each (sequence, most tokens), a draft, or None where there is nothing to go by."""
        ...

    def release(self, sequence: Sequence, *, complete: bool) -> None:
        """Forget a sequence that is over. `complete`: its output is whole, not cut off by an abort or an error."""
        ...
