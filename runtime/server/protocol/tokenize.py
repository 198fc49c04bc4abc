"""`/tokenize`, `/detokenize`, `/score`: types. `/tokenize` speaks vLLM (`prompt`, `messages`) and TGI (`inputs`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.server.protocol.chat import ChatMessage, Tool
from runtime.server.protocol.sampling import TokenId, Usage
from runtime.server.protocol.tgi import SimpleToken


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt`, `messages` (vLLM) and `inputs` (TGI)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    inputs: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


TokenizeAnswer = TokenizeResponse | list[SimpleToken]


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class ScoreRequest(msgspec.Struct, kw_only=True):
    """How likely is each `text_2` after `text_1`? Or, of a model that embeds: how near are the two?"""

    text_1: Annotated[str, msgspec.Meta(min_length=1)]
    text_2: str | list[str]
    model: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class ScoreData(msgspec.Struct, kw_only=True):
    """`score`: the summed log probability (natural) of the continuation's tokens; `mean`: a token's.

    Of a model that embeds: the cosine of the two texts' vectors, and nothing more.
    """

    index: int
    object: Literal["score"] = "score"
    score: float
    mean: float | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    is_greedy: bool | UnsetType = UNSET  # each token was the likeliest


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: Usage | UnsetType = UNSET
