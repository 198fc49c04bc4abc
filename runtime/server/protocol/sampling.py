"""How a request says how to sample: OpenAI's fields, and vLLM's beyond them, shared by every OpenAI route."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """vLLM's `structured_outputs`: exactly one of json, regex, choice, grammar, json_object."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that become `SamplingParams`. A null means: the model's default."""

    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[TokenId, float] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    speculation: bool | None = None  # ours: false drafts no tokens for this request
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names for structured_outputs.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class JsonSchemaSpec(msgspec.Struct, kw_only=True):
    schema: dict[str, Any]
    name: str = "schema"
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, tag="json_object", kw_only=True):
    value: dict[str, Any] | None = None  # TGI: a JSON schema


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", kw_only=True):
    json_schema: JsonSchemaSpec


class JsonFormat(msgspec.Struct, tag="json", kw_only=True):
    """TGI's: `value` is a JSON schema."""

    value: dict[str, Any]


class RegexFormat(msgspec.Struct, tag="regex", kw_only=True):
    """TGI's: `value` is a regular expression."""

    value: str


class GrammarFormat(msgspec.Struct, tag="grammar", kw_only=True):
    """A Lark grammar."""

    grammar: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | JsonFormat | RegexFormat | GrammarFormat


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Drafted tokens (speculation) that the model accepted, and that it refused."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request. `cached_tokens` were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET  # where tokens were drafted


# One position of `prompt_logprobs`: token id -> its entry (null for the first token, which has no history).
class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
