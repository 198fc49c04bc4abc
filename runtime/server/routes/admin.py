"""Loading and unloading models while the server runs; behind the admin key (see `middleware.Gate`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.server.docs import describe
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


@router.delete("/models/{model_name:path}", **describe(returns=Unloaded, statuses=(401, 403, 404)))
async def unload_model(request: Request, model_name: str) -> Response:
    """Stop serving a model: what it is answering ends with an error, and its memory is freed."""
    await state_of(request).registry.unload(model_name)
    return json_response(Unloaded(id=model_name))
