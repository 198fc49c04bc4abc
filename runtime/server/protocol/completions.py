"""`/v1/completions`: types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.server.protocol.sampling import (
    NonNegative,
    PromptLogprobs,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    TokenId,
    Usage,
)

# A text, several texts, a prompt as token ids, or several of those (a mix of texts and id lists is taken, too).
Prompt = str | list[str | TokenId | list[TokenId]]


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Prompt
    model: str | None = None
    max_tokens: NonNegative | None = 16
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry a token. `top_logprobs` maps a token's text to its log probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "plancast"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
