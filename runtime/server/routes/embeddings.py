"""`/v1/embeddings` and `/pooling`: refused, by name, for the causal models that are served here.

An artifact's only output today is its logits (see `runtime.executor.Executor`); a pooled hidden state needs one more.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.server.docs import describe
from runtime.server.errors import ApiError, Kind
from runtime.server.protocol.sampling import TokenId
from runtime.server.routes.common import accept

router = APIRouter(tags=["OpenAI"])


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: Annotated[str, msgspec.Meta(min_length=1)] | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None


@router.post("/v1/embeddings", **describe(body=EmbeddingRequest))
@router.post("/pooling", **describe(body=EmbeddingRequest))
async def create_embedding(request: Request) -> Response:
    """Refused with 400: no served model has an embedding output."""
    state, body = await accept(request, EmbeddingRequest, places=0)
    model = state.registry.get(body.model)
    message = (
        f"the model {model.name!r} has no embedding output: it was built to continue text. "
        "`/score` gives the likelihood of a text"
    )
    raise ApiError(Kind.INVALID, message, param="model", code="no_embedding_output")
