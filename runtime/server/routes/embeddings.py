"""`/v1/embeddings` (OpenAI) and `/pooling` (vLLM), for artifacts that were built with `task: embed`."""

from __future__ import annotations

import base64
from time import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.pooling import check_dimensions, embedding_of
from runtime.server import generation, prompts
from runtime.server.docs import describe
from runtime.server.embedding import embed_all, embedding_info, embedding_work
from runtime.server.protocol.embeddings import (
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    PoolingData,
    PoolingRequest,
    PoolingResponse,
)
from runtime.server.routes.common import accept, json_response, log_usage, usage_of
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", **describe(body=EmbeddingRequest, returns=EmbeddingResponse))
async def create_embedding(request: Request) -> Response:
    """One vector a text: its last hidden states, pooled."""
    state, body = await accept(request, EmbeddingRequest)
    model, vectors, counted = await _embed(request, state, body)
    data = [EmbeddingData(index=index, embedding=vector) for index, vector in enumerate(vectors)]
    name = generation.new_id("embd-")
    return json_response(EmbeddingResponse(data=data, model=model, usage=counted, id=name, created=int(time())))


@router.post("/pooling", tags=["vLLM"], **describe(body=PoolingRequest, returns=PoolingResponse))
async def pooling(request: Request) -> Response:
    """As `/v1/embeddings`, in vLLM's form."""
    state, body = await accept(request, PoolingRequest)
    model, vectors, counted = await _embed(request, state, body)
    data = [PoolingData(index=index, data=vector) for index, vector in enumerate(vectors)]
    name = generation.new_id("pool-")
    return json_response(PoolingResponse(id=name, created=int(time()), model=model, data=data, usage=counted))


async def _embed(
    request: Request, state: ServerState, body: EmbeddingRequest
) -> tuple[str, list[list[float] | str], EmbeddingUsage]:
    """The model's name, each input's vector as the request wants it written, and what was read."""
    model = state.registry.get(body.model)
    info = embedding_info(model)
    check_dimensions(body.dimensions, info)
    encoded = await prompts.encode_prompts(
        model,
        body.input,
        add_special_tokens=body.add_special_tokens,
        max_prompts=state.config.limits.max_inputs,
        param="input",
    )
    works = [
        embedding_work(
            model,
            ids,
            "embeddings",
            "input" if len(encoded) == 1 else f"input[{number}]",
            truncate=body.truncate_prompt_tokens,
            priority=body.priority,
            user=body.user,
            cache_salt=body.cache_salt,
        )
        for number, (ids, _) in enumerate(encoded)
    ]
    results = await unless_disconnected(request, embed_all(state, model, works))
    counted = usage_of(results)
    log_usage(request, counted)
    vectors: list[list[float] | str] = []
    for result in results:
        vector = embedding_of(result, info, dimensions=body.dimensions, normalize=body.normalize)
        written = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        vectors.append(written if body.encoding_format == "base64" else vector.tolist())
    return model.name, vectors, EmbeddingUsage(prompt_tokens=counted.prompt_tokens, total_tokens=counted.prompt_tokens)
