"""`SamplingParams`: vLLM's names and semantics, and the check of each field."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from runtime.tokenizer import Tokenizer

# Below this temperature sampling is greedy, as in vLLM.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to sample one request. Field names, defaults and meaning follow vLLM's `SamplingParams`."""

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    logprobs: int | None = None  # 0: the sampled token alone; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    # Beam search: `beam_width` > 0 turns it on (n best hypotheses of that many beams).
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    # Structured output, as vLLM's `structured_outputs` (json, regex, choice, grammar, json_object).
    structured_outputs: dict | None = None
    # False: no drafts for this request. It makes no difference to its text, only to its speed.
    speculation: bool | None = None
    # For logits processors of one's own.
    extra_args: dict[str, Any] | None = None
    # `bad_words` as token ids: filled by `resolved`, since the core has no tokenizer.
    bad_words_token_ids: list[list[int]] | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that the core runs for the request: `best_of`, or `n` where that is not given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed, their own or a random one: a resumed request then draws what it would have."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbits(63))

    def resolved(self, tokenizer: Tokenizer) -> SamplingParams:
        """These parameters with everything textual that the core needs as token ids, and with a seed."""
        params = self.with_seed()
        if params.bad_words:
            params = msgspec.structs.replace(params, bad_words_token_ids=bad_word_ids(params.bad_words, tokenizer))
        return params

    def verify(
        self,
        *,
        vocab_size: int,
        max_context_len: int,
        prompt_len: int | None = None,
        max_logprobs: int = 20,
    ) -> None:
        """Check each field and the conflicts between them. Raises `RequestError` (name, value, range).

        `prompt_len` (tokens, after truncation) adds the checks that need it. `max_logprobs` bounds `logprobs` and
        `prompt_logprobs`; -1 bounds them by the vocabulary.
        """
        from runtime.sampling.params_check import Verifier

        Verifier(self, vocab_size, max_context_len, prompt_len, max_logprobs).run()


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token sequences of `bad_words`, each as it begins a text and as it follows a space (vLLM's two forms)."""
    sequences: list[list[int]] = []
    for word in words:
        bare = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        # A spaced form that ends with the bare one is forbidden by it already.
        for ids in (bare,) if bare and spaced[-len(bare) :] == bare else (bare, spaced):
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
