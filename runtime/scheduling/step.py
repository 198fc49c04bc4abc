"""What the scheduler decides for one step: who computes how many tokens, and which blocks move before."""

from __future__ import annotations

from runtime.sequence import Request, Sequence
from runtime.swap import SwapMove


class ScheduledSequence:
    """A sequence's part in a step: its next `num_tokens` tokens (drafts last), with logits for the last `num_rows`."""

    __slots__ = ("num_rows", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_rows: int):
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_rows = num_rows


class ScheduledStep:
    """What one step does. The moves to and from the host tier come first, in their order, then the copies, then the
    pass."""

    __slots__ = (
        "admitted",
        "copies",
        "moves",
        "num_decode_tokens",
        "num_draft_tokens",
        "num_prefill_tokens",
        "preempted",
        "sequences",
    )

    def __init__(self) -> None:
        self.sequences: list[ScheduledSequence] = []
        self.num_decode_tokens = 0  # drafted ones included
        self.num_draft_tokens = 0
        self.num_prefill_tokens = 0
        self.copies: list[tuple[int, int]] = []  # (source block, target block)
        self.moves: list[SwapMove] = []
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
