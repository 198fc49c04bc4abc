"""What the sampler remembers of one sequence."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import RequestError
from runtime.logits_processors import LogitsProcessor
from runtime.philox import TOKEN_STREAM, uniforms
from runtime.sampling.selection import Restriction
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.structured import Grammar

# Uniform numbers are drawn for this many output positions at a time.
UNIFORM_BLOCK = 32


class SamplingState:
    """One sequence: its parameters, its processors and grammar, and the tokens of its output.

    Tell it each kept token by `append`; `truncate` takes drafted tokens back; `fork` branches off another sequence.
    """

    __slots__ = (
        "_uniform_start",
        "_uniforms",
        "cumulative_logprob",
        "grammar",
        "greedy",
        "num_top",
        "output_token_ids",
        "params",
        "processors",
        "restricted",
        "restriction",
        "seed",
        "sequence_index",
        "wants_logprob",
    )

    def __init__(
        self,
        params: SamplingParams,
        sequence_index: int,
        processors: list[LogitsProcessor],
        grammar: Grammar | None = None,
        output_token_ids: Sequence[int] = (),
    ):
        self.params = params
        self.sequence_index = sequence_index
        self.processors = processors
        self.grammar = grammar
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.greedy = params.is_greedy
        self.restriction = Restriction.of(params)
        self.restricted = not self.restriction.is_void
        self.num_top = params.logprobs
        self.wants_logprob = params.logprobs is not None or params.num_sequences > params.n
        self.output_token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self._uniform_start = -1
        self._uniforms: list[float] = []
        for token_id in output_token_ids:
            self.append(token_id)
        if output_token_ids and grammar is not None and grammar.failure is not None:
            raise RequestError(f"the grammar forbids the output that the sequence resumes from: {grammar.failure}")

    @property
    def is_plain(self) -> bool:
        """Whether temperature, top_k, top_p and min_p are all that it is sampled with."""
        return not self.processors and self.grammar is None and self.restriction.typical_p == 1.0

    @property
    def position(self) -> int:
        """Output position of the next token: the counter of its random numbers."""
        return len(self.output_token_ids)

    def append(self, token_id: int, logprob: float | None = None) -> None:
        """`token_id` is part of the output now; `logprob` (natural) adds to `cumulative_logprob`."""
        self.output_token_ids.append(token_id)
        if logprob is not None:
            self.cumulative_logprob += logprob
        for processor in self.processors:
            processor.append(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)

    def truncate(self, num_output_tokens: int) -> None:
        """Take back the output tokens from position `num_output_tokens` on. `cumulative_logprob` stays as it is."""
        removed = self.output_token_ids[num_output_tokens:]
        if not removed:
            return
        del self.output_token_ids[num_output_tokens:]
        for processor in self.processors:
            processor.rewind(removed)
        if self.grammar is not None:
            self.grammar.rewind(len(removed))

    def fork(self, sequence_index: int) -> SamplingState:
        """A sequence with the same past that goes its own way, with the random numbers of its own index."""
        grammar = self.grammar.fork() if self.grammar is not None else None
        params = self.params if self.params.seed is not None else self._seeded_params()
        copy = SamplingState(params, sequence_index, [p.fork() for p in self.processors], grammar)
        copy.output_token_ids = self.output_token_ids.copy()
        copy.cumulative_logprob = self.cumulative_logprob
        return copy

    def uniform(self) -> float:
        """The number in [0, 1) that picks the next token."""
        if self.lacks_uniform():
            fill_uniforms([self])
        return self._uniforms[len(self.output_token_ids) - self._uniform_start]

    def lacks_uniform(self) -> bool:
        """Whether the next number must be drawn first (`fill_uniforms` does so for many states at once)."""
        return not 0 <= len(self.output_token_ids) - self._uniform_start < len(self._uniforms)

    def _seeded_params(self) -> SamplingParams:
        import msgspec

        return msgspec.structs.replace(self.params, seed=self.seed)


def fill_uniforms(states: Sequence[SamplingState]) -> None:
    """Draw the next `UNIFORM_BLOCK` numbers of each state in one pass."""
    starts = np.array([state.position for state in states], np.uint64)
    numbers = uniforms(
        np.array([state.seed for state in states], np.uint64)[:, None],
        np.array([state.sequence_index for state in states], np.uint64)[:, None],
        starts[:, None] + np.arange(UNIFORM_BLOCK, dtype=np.uint64),
        TOKEN_STREAM,
    ).tolist()
    for state, row in zip(states, numbers, strict=True):
        state._uniforms = row
        state._uniform_start = state.position
