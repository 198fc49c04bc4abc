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

from runtime.errors import RequestError
from runtime.logits_processors import NEG_INF, LogitsProcessorFactory, build_processors
from runtime.logprobs import RowLogprobs
from runtime.messages import TokenLogprobs
from runtime.sampling.narrow import MAX_CANDIDATES, NarrowRow, draw
from runtime.sampling.rows import ChunkedExp, chunk_maxima, search_cdf
from runtime.sampling.selection import candidates, select
from runtime.sampling.state import SamplingState, fill_uniforms
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.structured import GrammarCompiler

__all__ = ["SampledToken", "Sampler", "SamplingState"]


@dataclass(slots=True)
class SampledToken:
    """A sampled token, or (`error`) why none could be: then only this sequence is affected."""

    token_id: int
    logprob: float | None = None  # of the engine's logits, where the request needs it
    logprobs: TokenLogprobs | None = None
    error: str | None = None


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

    def sample(self, logits: NDArray[np.float32], states: Sequence[SamplingState]) -> list[SampledToken]:
        """One token for each row of `logits` f32 [R, V], which is left as it is. The states are not advanced."""
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
                self._add_logprobs(raw, state, result)
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
        maxima = chunk_maxima(row) if restriction.needs_chunks else row
        row_max = float(maxima.max())
        if not math.isfinite(row_max):
            return _no_token(raw, row_max)
        found = candidates(row, maxima, row_max, self._exp, restriction)
        if found.ids.size <= MAX_CANDIDATES:
            return NarrowRow(found, row_max, restriction, state.uniform())
        ids, weights = select(found, row_max, restriction)
        return SampledToken(int(ids[search_cdf(np.cumsum(weights), state.uniform())]))

    def _add_logprobs(self, raw: NDArray[np.float32], state: SamplingState, result: SampledToken) -> None:
        logprobs = RowLogprobs(raw, self._exp)
        result.logprob = logprobs.logprob(result.token_id)
        if state.num_top is not None:
            result.logprobs = logprobs.gather(result.token_id, state.num_top)

    def distribution(
        self, raw: NDArray[np.float32], state: SamplingState
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What `sample` draws from: the ids that may be sampled from the row i64 [K], ascending, and their
        probabilities f64 [K]; for a greedy state the one id. Raises `RequestError` where there is none."""
        row = self.processed(raw, state)
        row_max = float(row.max())
        if not math.isfinite(row_max):
            raise RequestError(_no_token(raw, row_max).error or "")
        if state.greedy:
            return np.array([row.argmax()]), np.ones(1)
        found = candidates(row, chunk_maxima(row), row_max, self._exp, state.restriction)
        ids, weights = select(found, row_max, state.restriction)
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
        why = (
            "no token may be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar together "
            "forbid the whole vocabulary"
        )
    else:
        why = f"the engine's logits are not finite (their maximum is {row_max}), so nothing can be sampled from them"
    return SampledToken(-1, error=why)
