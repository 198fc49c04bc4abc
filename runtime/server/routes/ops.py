"""For operators: is it alive, is it ready, which version, what does it measure."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import PlancastError
from runtime.sampling_params import SamplingParams
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Kind
from runtime.server.generation import new_id
from runtime.server.protocol.completions import ModelCard, ModelList
from runtime.server.registry import ServedModel
from runtime.server.routes.common import json_response
from runtime.server.state import state_of

router = APIRouter(tags=["Operation"])

# A probe that waits longer in the queue says: not ready.
PROBE_TIMEOUT_S = 10.0
RECENT_S = 5.0


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct):
    version: str


@router.get("/health", **describe(returns=Health, statuses=(503,)))
@router.get("/ping", **describe(returns=Health, statuses=(503,)))
async def health(request: Request) -> Response:
    """Alive: the process answers and no engine is dead."""
    for model in state_of(request).registry:
        if not model.engine.is_alive:
            raise ApiError(Kind.UNAVAILABLE, f"the engine of {model.name!r} is dead", code="engine_dead")
    return json_response(Health())


@router.get("/ready", **describe(returns=Health, statuses=(503,)))
async def ready(request: Request) -> Response:
    """Ready: not draining, and every engine answers a one-token probe."""
    state = state_of(request)
    state.admission.check(0)
    if not len(state.registry):
        raise ApiError(Kind.UNAVAILABLE, "no model is loaded", code="no_model")
    for model in state.registry:
        if time.monotonic() - model.last_output < RECENT_S:
            continue  # it is answering others: no need to ask
        try:
            await asyncio.wait_for(_probe(model), PROBE_TIMEOUT_S)
        except TimeoutError:
            message = f"the engine of {model.name!r} did not answer a probe within {PROBE_TIMEOUT_S:g} s"
            raise ApiError(Kind.UNAVAILABLE, message, code="not_ready") from None
        except PlancastError as error:
            raise ApiError(Kind.UNAVAILABLE, f"{model.name!r} is not ready: {error}", code="not_ready") from None
    return json_response(Health())


async def _probe(model: ServedModel) -> None:
    token = model.engine.tokenizer.eos_token_id or 0
    prompt, request_id = {"prompt_token_ids": [token]}, new_id("probe-")
    if model.engine.manifest.embedding is not None:
        outputs = model.engine.embed(prompt, request_id=request_id)
    else:
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        outputs = model.engine.generate(prompt, params, request_id=request_id)
    async for _ in outputs:
        pass


@router.get("/version", **describe(returns=Version))
async def version(request: Request) -> Response:
    """plancast's version."""
    return json_response(Version(request.app.version))


@router.get("/metrics", **describe(returns=str, media_type=("text/plain", "application/openmetrics-text")))
async def metrics(request: Request) -> Response:
    """Prometheus metrics, under vLLM's names."""
    state = state_of(request)
    engines = {name: (model.engine.manifest, stats) for name, (model, stats) in (await state.stats()).items()}
    content, content_type = state.metrics.render(request.headers.get("accept", ""), engines)
    return Response(content, headers={"content-type": content_type})


@router.get("/v1/models", tags=["OpenAI"], **describe(returns=ModelList))
async def list_models(request: Request) -> Response:
    """The models that are served."""
    return json_response(ModelList(data=[model_card(model) for model in state_of(request).registry]))


@router.get("/v1/models/{model_name:path}", tags=["OpenAI"], **describe(returns=ModelCard, statuses=(404,)))
async def get_model(request: Request, model_name: str) -> Response:
    """One model."""
    return json_response(model_card(state_of(request).registry.get(model_name)))


def model_card(model: ServedModel) -> ModelCard:
    """A model as `/v1/models` shows it."""
    root = model.engine.manifest.model.source
    return ModelCard(id=model.name, created=model.created, root=root, max_model_len=model.max_context_len)
