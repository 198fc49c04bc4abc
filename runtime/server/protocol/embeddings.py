"""`/v1/embeddings` (OpenAI) and `/pooling` (vLLM): types."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from runtime.server.protocol.sampling import TokenId

# A text, several texts, a prompt as token ids, or several of those.
EmbeddingInput = Annotated[str, msgspec.Meta(min_length=1)] | list[str | TokenId | list[TokenId]]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`dimensions` keeps the vector's first entries, and `normalize` (vLLM's) overrides what the artifact says."""

    input: EmbeddingInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """vLLM's `/pooling`. The one pooling task is `embed`."""

    task: Literal["embed"] | None = None


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(msgspec.Struct, kw_only=True):
    """`embedding`: the numbers, or the bytes of little-endian f32 in base64."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
    id: str
    created: int


class PoolingData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: EmbeddingUsage
