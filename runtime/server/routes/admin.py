"""Loading and unloading models while the server runs; behind the admin key (see `middleware.Gate`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import EngineDeadError, PlancastError
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Kind
from runtime.server.protocol.completions import ModelCard
from runtime.server.routes.common import accept, json_response
from runtime.server.routes.ops import model_card
from runtime.server.state import state_of

router = APIRouter(prefix="/admin", tags=["Admin"])


class LoadRequest(msgspec.Struct, kw_only=True):
    """`path`: an artifact's folder on the server. `name`: what clients call it; default: its own."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


class Unloaded(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model.deleted"] = "model.deleted"
    deleted: bool = True


@router.post("/models", **describe(body=LoadRequest, returns=ModelCard, statuses=(403, 409)))
async def load_model(request: Request) -> Response:
    """Open an artifact and serve it."""
    state, body = await accept(request, LoadRequest, places=0)
    return json_response(model_card(await state.registry.load(Path(body.path), body.name)))


class SpeculationSwitch(msgspec.Struct, kw_only=True):
    """`model`: which; may be left out where there is one."""

    enabled: bool
    model: str | None = None


class SpeculationState(msgspec.Struct, kw_only=True):
    """`was`: before the call."""

    model: str
    enabled: bool
    was: bool


@router.post("/speculation", **describe(body=SpeculationSwitch, returns=SpeculationState, statuses=(403, 404)))
async def switch_speculation(request: Request) -> Response:
    """Turn drafting on or off, for the requests that run too. No text changes by it."""
    state, body = await accept(request, SpeculationSwitch, places=0)
    model = state.registry.get(body.model)
    try:
        was = await model.engine.set_speculation(body.enabled)
    except EngineDeadError:
        raise
    except PlancastError as error:
        raise ApiError(Kind.INVALID, str(error), param="enabled", code="speculation_unavailable") from None
    return json_response(SpeculationState(model=model.name, enabled=body.enabled, was=was))


@router.delete("/models/{model_name:path}", **describe(returns=Unloaded, statuses=(401, 403, 404)))
async def unload_model(request: Request, model_name: str) -> Response:
    """Stop serving a model: what it is answering ends with an error, and its memory is freed."""
    await state_of(request).registry.unload(model_name)
    return json_response(Unloaded(id=model_name))
