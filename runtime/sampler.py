"""The sampler: logits of many sequences in, one token each out.

Each row takes only the passes that its parameters need: greedy rows one argmax, top-k rows one pass of chunk maxima,
others one pass of exp. A row's token depends on its own logits, parameters, seed and output position and on nothing
else in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.errors import GenerationError, RequestError
from runtime.logits_processors import NEG_INF, LogitsProcessorFactory, build_processors
from runtime.logprobs import RowLogprobs, not_finite
from runtime.messages import TokenLogprobs
from runtime.sampling.narrow import MAX_CANDIDATES, NarrowRow, draw
from runtime.sampling.rows import ChunkedExp, search_cdf
from runtime.sampling.selection import candidates, select
from runtime.sampling.state import SamplingState, fill_uniforms
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.structured import GrammarCompiler

__all__ = ["NOTHING_ALLOWED", "SampledToken", "Sampler", "SamplingState"]

NOTHING_ALLOWED = (
    "no token may be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar together "
    "forbid the whole vocabulary"
)


@dataclass(slots=True)
class SampledToken:
    """A sampled token, or (`error`) why none could be: then only this sequence is affected.

    `error_kind`: "request", or "generation" where the engine's logits are at fault (see `RequestDelta.error_kind`).
    """

    token_id: int
    logprob: float | None = None  # of the engine's logits, where the request needs it
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    error_kind: str = "request"


class Sampler:
    """Samples for one engine. Not thread-safe: it reuses its buffers."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        grammars: GrammarCompiler | None = None,
        logits_processors: Iterable[LogitsProcessorFactory] = (),
    ):
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._eos = np.array([i for i in self.eos_token_ids if i < vocab_size], np.int64)
        self._factories = tuple(logits_processors)
        self._exp = ChunkedExp(vocab_size)
        self._edited = np.empty(vocab_size, np.float32)

    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        sequence_index: int = 0,
        output_token_ids: Sequence[int] = (),
    ) -> SamplingState:
        """The state of one sequence. `output_token_ids` are those that a resumed sequence has already.

        Raises `RequestError` where the structured output asked for is malformed. A grammar that does not compile shows
        as the `error` of its first token: the client checks it first (`GrammarCompiler.check`).
        """
        grammar = None
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise RequestError(
                    "structured output needs an engine with a tokenizer; this one has none", "structured_outputs"
                )
            grammar = self._grammars.compile(params.structured_outputs)
        processors = build_processors(params, prompt_token_ids, self.eos_token_ids, self._factories)
        return SamplingState(params, sequence_index, processors, grammar, output_token_ids)

    def prefetch(self, states: Sequence[SamplingState | None]) -> None:
        """Start on the grammar masks of `states` beside the model's step; `sample` waits for them. None: a beam."""
        if self._grammars is not None:
            self._grammars.prefetch(
                [state.grammar for state in states if state is not None and state.grammar is not None]
            )

    def sample(
        self, logits: NDArray[np.float32] | Sequence[NDArray[np.float32]], states: Sequence[SamplingState]
    ) -> list[SampledToken]:
        """One token for each row of `logits` f32 [R, V], or [V] each, which are left as they are. The states are not
        advanced."""
        lacking = [state for state in states if not state.greedy and state.lacks_uniform()]
        if lacking:
            fill_uniforms(lacking)
        results: list[SampledToken] = []
        narrow: list[NarrowRow] = []
        narrow_results: list[SampledToken] = []
        for raw, state in zip(logits, states, strict=True):
            picked = self._pick(raw, state)
            if isinstance(picked, NarrowRow):
                narrow.append(picked)
                picked = SampledToken(-1)
                narrow_results.append(picked)
            results.append(picked)
        if narrow:
            for result, token_id in zip(narrow_results, draw(narrow), strict=True):
                result.token_id = token_id
        for raw, state, result in zip(logits, states, results, strict=True):
            if state.wants_logprob and result.error is None:
                self.add_logprobs(raw, state, result)
        return results

    def _pick(self, raw: NDArray[np.float32], state: SamplingState) -> SampledToken | NarrowRow:
        """The row's token, or what is left to do for it together with others."""
        try:
            row = self.processed(raw, state)
        except RequestError as error:  # the grammar does not compile, or is too complex to follow
            return SampledToken(-1, error=str(error))
        if state.greedy:
            token_id = int(row.argmax())
            row_max = float(row[token_id])
            return SampledToken(token_id) if math.isfinite(row_max) else _no_token(raw, row_max)
        restriction = state.restriction
        if not state.restricted:
            if self._exp.fill(row, restriction.temperature):
                return SampledToken(self._exp.pick(state.uniform()))
            return _no_token(raw, float(row.max()))
        found = candidates(row, self._exp, restriction)
        if not math.isfinite(found.row_max):
            return _no_token(raw, found.row_max)
        if found.ids.size <= MAX_CANDIDATES:
            return NarrowRow(found, restriction, state.uniform())
        ids, weights = select(found, restriction)
        if ids.size <= MAX_CANDIDATES:  # `found` was wide, what is left of it is not: in the order of the narrow ones
            order = (-row[ids]).argsort(kind="stable")
            ids, weights = ids[order], weights[order]
        return SampledToken(int(ids[search_cdf(np.cumsum(weights), state.uniform())]))

    def add_logprobs(self, raw: NDArray[np.float32], state: SamplingState, result: SampledToken) -> None:
        """Set `result`'s log probabilities, under the row `raw` f32 [V] as it left the model."""
        logprobs = RowLogprobs(raw, self._exp)
        result.logprob = logprobs.logprob(result.token_id)
        if math.isnan(result.logprob):  # the mask has hidden what is wrong with the row, but its sum has not
            result.error, result.error_kind = not_finite(math.nan), "generation"
            return
        if state.num_top is not None:
            result.logprobs = logprobs.gather(result.token_id, state.num_top)

    def distribution(
        self, raw: NDArray[np.float32], state: SamplingState
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What `sample` draws from: the ids that may be sampled from the row i64 [K], ascending, and their
        probabilities f64 [K]; for a greedy state the one id. Where there is none raises `RequestError`, or
        `GenerationError` where the logits are at fault."""
        row = self.processed(raw, state)
        row_max = float(row.max())
        if not math.isfinite(row_max):
            missing = _no_token(raw, row_max)
            raise (GenerationError if missing.error_kind == "generation" else RequestError)(missing.error or "")
        return self.distribution_of(row, state)

    def distribution_of(
        self, row: NDArray[np.float32], state: SamplingState
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The same of a row f32 [V] that is processed already and has a finite maximum."""
        if state.greedy:
            return np.array([row.argmax()]), np.ones(1)
        ids, weights = select(candidates(row, self._exp, state.restriction), state.restriction)
        return ids, weights / weights.sum()

    def processed(self, raw: NDArray[np.float32], state: SamplingState) -> NDArray[np.float32]:
        """The row after processors and grammar: `raw` itself where there are none, else a buffer used again."""
        if not state.processors and state.grammar is None:
            return raw
        row = self._edited
        np.copyto(row, raw)
        for processor in state.processors:
            processor.apply(row)
        if state.grammar is not None:
            state.grammar.apply(row)
            # A complete text may end before min_tokens where the grammar leaves nothing else.
            if state.grammar.may_end and not row.max() > NEG_INF:
                row[self._eos] = raw[self._eos]
        return row


def _no_token(raw: NDArray[np.float32], row_max: float) -> SampledToken:
    if math.isfinite(float(raw.max())):
        return SampledToken(-1, error=NOTHING_ALLOWED)
    return SampledToken(-1, error=not_finite(row_max), error_kind="generation")
