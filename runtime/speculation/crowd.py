"""Whether to look for drafts where many sequences run: seldom once that was in vain, and never at a loss that adds up.

What drafts save is measured, step by step, in steps: of the time that a plain step would have taken, the part that was
not needed for each sequence to go on by a token, drafting included. What was saved may be lost again, and a hundredth
of the time beside it. So a crowd that drafts loses no more than that, whatever estimates made it draft.
"""

from __future__ import annotations

from dataclasses import dataclass

CROWD = 8  # sequences, or tokens, that are many
# To look for drafts takes a fortieth of a step, or with a head a seventh: after a look that did not pay the next one
# comes so many steps later, then twice as many, up to a bound.
_FIRST_REST, _LONGEST_REST = 4, 16
_ALLOWED = 0.01  # steps, each step
# Saved steps count up to so many: what paid for long need not pay any more. Allowed ones up to so many.
_MOST_SAVED, _MOST_ALLOWED = 4.0, 1.0


@dataclass(slots=True)
class CrowdDrafting:
    """When to draft for a crowd. `balance`: steps that may be lost."""

    balance: float = _MOST_ALLOWED
    rest: int = 0  # steps that are still to come without a look
    next_rest: int = _FIRST_REST

    def looks(self, after: int = 0) -> bool:
        """Whether to look for drafts before the next step, or before the one `after` so many."""
        return self.rest <= after and self.balance > 0.0

    def passed(self) -> None:
        """A step has run that no drafts were looked for in."""
        self.rest -= 1
        self._allow()

    def settle(self, saved: float, *, drafted: bool) -> None:
        """A step has run that drafts were looked for in, and (`drafted`) found; it saved so many (of one), or lost
        them."""
        self.balance = min(_MOST_SAVED, self.balance + saved)
        if saved > 0.0 or (drafted and self.balance > _MOST_ALLOWED):  # one that lost among those that saved is chance
            self.rest, self.next_rest = 0, _FIRST_REST
        else:
            self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        self._allow()

    def _allow(self) -> None:
        if self.balance < _MOST_ALLOWED:
            self.balance = min(_MOST_ALLOWED, self.balance + _ALLOWED)
