"""`SamplingParams`: vLLM's names and semantics. Fields here; validation in `verify()`."""

from __future__ import annotations

import msgspec


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
