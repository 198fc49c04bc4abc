"""What may change a sequence's logits before temperature: a small protocol, and the built-in processors.

Order and meaning are vLLM's: allowed tokens, bad words, min_tokens, logit bias, then penalties. A processor belongs to
one sequence and is told of each token that joins it; `rewind` takes tokens back when drafted ones are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.sampling_params import SamplingParams

NEG_INF = np.float32(-np.inf)


@runtime_checkable
class LogitsProcessor(Protocol):
    """Edits one sequence's logits in place. Minus infinity forbids a token."""

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Edit `logits` f32 [V], the scores of the next token."""
        ...

    def append(self, token_id: int) -> None:
        """A token has joined the output."""
        ...

    def rewind(self, token_ids: Sequence[int]) -> None:
        """The last `len(token_ids)` tokens, these ones, have left the output."""
        ...

    def fork(self) -> LogitsProcessor:
        """An equal processor that lives on its own, for a sequence that branches off here."""
        ...


# Makes a processor for one sequence, or None where its parameters do not ask for one.
LogitsProcessorFactory = Callable[[SamplingParams, Sequence[int]], "LogitsProcessor | None"]


class _Stateless:
    """A processor that does not depend on the output."""

    def append(self, token_id: int) -> None:
        pass

    def rewind(self, token_ids: Sequence[int]) -> None:
        pass

    def fork(self):
        return self


class AllowedTokens(_Stateless):
    """`allowed_token_ids`: nothing else may be sampled."""

    def __init__(self, token_ids: Iterable[int]):
        self._ids = np.unique(np.fromiter(token_ids, np.int64))

    def apply(self, logits: NDArray[np.float32]) -> None:
        kept = logits[self._ids]
        logits.fill(NEG_INF)
        logits[self._ids] = kept


class LogitBias(_Stateless):
    """`logit_bias`: added to the tokens' logits."""

    def __init__(self, bias: dict[int, float]):
        self._ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._values = np.fromiter(bias.values(), np.float32, len(bias))

    def apply(self, logits: NDArray[np.float32]) -> None:
        logits[self._ids] += self._values


class MinTokens:
    """`min_tokens`: the tokens that would end the sequence are forbidden until it is that long."""

    def __init__(self, min_tokens: int, stop_token_ids: Iterable[int]):
        self._left = min_tokens
        self._ids = np.unique(np.fromiter(stop_token_ids, np.int64))

    def apply(self, logits: NDArray[np.float32]) -> None:
        if self._left > 0:
            logits[self._ids] = NEG_INF

    def append(self, token_id: int) -> None:
        self._left -= 1

    def rewind(self, token_ids: Sequence[int]) -> None:
        self._left += len(token_ids)

    def fork(self) -> MinTokens:
        copy = MinTokens(self._left, ())
        copy._ids = self._ids
        return copy


class BadWords:
    """`bad_words`: the last token of a forbidden token sequence is forbidden where the output ends with the others.

    As in vLLM only the output counts: a word that begins in the prompt may end in the output.
    """

    def __init__(self, words: Iterable[Sequence[int]]):
        words = [tuple(word) for word in words]
        self._single = np.unique(np.array([word[0] for word in words if len(word) == 1], np.int64))
        self._longer = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._tail_length = max((len(prefix) for prefix, _ in self._longer), default=0)
        self._output: list[int] = []

    def apply(self, logits: NDArray[np.float32]) -> None:
        if self._single.size:
            logits[self._single] = NEG_INF
        if not self._longer:
            return
        tail = tuple(self._output[-self._tail_length :])
        for prefix, last in self._longer:
            if tail[-len(prefix) :] == prefix:
                logits[last] = NEG_INF

    def append(self, token_id: int) -> None:
        if self._longer:
            self._output.append(token_id)

    def rewind(self, token_ids: Sequence[int]) -> None:
        if self._longer and token_ids:
            del self._output[-len(token_ids) :]

    def fork(self) -> BadWords:
        copy = BadWords(())
        copy._single, copy._longer, copy._tail_length = self._single, self._longer, self._tail_length
        copy._output = self._output.copy()
        return copy


class Penalties:
    """`repetition_penalty` over prompt and output, then `frequency_penalty` and `presence_penalty` over the output.

    Repetition as in CTRL (Keskar et al. 2019): a positive logit is divided by the penalty, a negative one multiplied.
    Frequency and presence as in the OpenAI API: logit - frequency * count - presence * (count > 0).
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Iterable[int]):
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        seen = dict.fromkeys(prompt_token_ids) if params.repetition_penalty != 1.0 else {}
        # Slot i holds a token met so far and how often it is in the output; `_size` slots are in use.
        self._slots = {token_id: slot for slot, token_id in enumerate(seen)}
        self._size = len(seen)
        self._ids = np.zeros(max(64, 2 * self._size), np.int64)
        self._ids[: self._size] = np.fromiter(seen, np.int64, self._size)
        self._counts = np.zeros(self._ids.size, np.float32)
        self._num_prompt = self._size
        self._rewound = False

    def apply(self, logits: NDArray[np.float32]) -> None:
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        if self._repetition != 1.0:
            # The smaller of the two is the quotient of a positive logit and the product of a negative one.
            pick = np.minimum if self._repetition >= 1.0 else np.maximum
            penalized = pick(values / self._repetition, values * self._repetition)
            if self._rewound:  # a token whose count fell back to 0 is no longer in the text
                in_text = counts > 0
                in_text[: self._num_prompt] = True
                np.copyto(values, penalized, where=in_text)
            else:
                values = penalized
        if self._frequency:
            values -= self._frequency * counts
        if self._presence:
            values -= self._presence * (counts > 0)
        logits[ids] = values

    def append(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._size
            if slot == self._ids.size:
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, np.float32)])
            self._slots[token_id] = slot
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    def rewind(self, token_ids: Sequence[int]) -> None:
        self._rewound = True
        for token_id in token_ids:
            self._counts[self._slots[token_id]] -= 1

    def fork(self) -> Penalties:
        copy = object.__new__(Penalties)
        copy.__dict__.update(self.__dict__)
        copy._slots, copy._ids, copy._counts = self._slots.copy(), self._ids.copy(), self._counts.copy()
        return copy


def build_processors(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    eos_token_ids: Iterable[int],
    factories: Iterable[LogitsProcessorFactory] = (),
) -> list[LogitsProcessor]:
    """The processors that `params` asks for, in the order in which they apply; those of `factories` come last."""
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words_token_ids:
        processors.append(BadWords(params.bad_words_token_ids))
    if params.min_tokens > 0:
        processors.append(MinTokens(params.min_tokens, {*eos_token_ids, *(params.stop_token_ids or ())}))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        processors.append(Penalties(params, prompt_token_ids))
    processors.extend(p for p in (make(params, prompt_token_ids) for make in factories) if p is not None)
    return processors
