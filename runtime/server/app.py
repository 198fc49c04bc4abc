"""The FastAPI application: every route, behind one gate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import PlancastError
from runtime.server import docs, logs
from runtime.server.config import ServerConfig
from runtime.server.errors import ApiError, Kind, dialect_of, route_path, to_api_error
from runtime.server.middleware import Gate
from runtime.server.registry import ModelRegistry
from runtime.server.routes import admin, anthropic, chat, completions, embeddings, ops, page, responses, tgi, tokenize
from runtime.server.sse import ClientGoneError
from runtime.server.state import ServerState
from runtime.version import __version__

_ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
    tokenize.router,
    tgi.router,
    anthropic.router,
    ops.router,
    page.router,
    admin.router,
)
_HTTP_KINDS = {404: Kind.NOT_FOUND, 405: Kind.METHOD, 413: Kind.TOO_LARGE, 415: Kind.MEDIA_TYPE}


def create_app(config: ServerConfig, registry: ModelRegistry) -> FastAPI:
    """The application over the registry's models. It closes them when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await registry.close()
        if state.tracer is not None:
            state.tracer.close()

    app = FastAPI(
        title="plancast",
        version=__version__,
        description="Models served under OpenAI's, TGI's and Anthropic's protocols.",
        lifespan=lifespan,
        redoc_url=None,
    )
    state = app.state.server = ServerState(config, registry)
    for router in _ROUTERS:
        app.include_router(router)
    for kind in (ApiError, PlancastError, HTTPException):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientGoneError, _client_gone)
    page.mount(app)
    docs.install(app)
    # The last added is the outermost: CORS answers preflights before the gate asks for a key.
    app.add_middleware(Gate, state=state)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _failed(request: Request, error: Exception) -> Response:
    """An error as its protocol says it."""
    if isinstance(error, HTTPException):
        kind = _HTTP_KINDS.get(error.status_code, Kind.INVALID)
        path = f"{request.method} {route_path(request.scope)}"
        message = f"there is no {path}" if kind is Kind.NOT_FOUND else f"{path}: {error.detail}"
        failure = ApiError(kind, message)
    else:
        failure = to_api_error(error)
    request.app.state.server.metrics.failed(failure.kind.value[4])
    response = failure.response(dialect_of(request.scope), logs.request_id.get())
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the log does
