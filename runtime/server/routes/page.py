"""The live page at `/`, its files, and its feed."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from runtime.server.docs import describe
from runtime.server.routes.common import stream_response
from runtime.server.state import state_of

STATIC = Path(__file__).resolve().parent.parent / "static"

# The page runs its own files and talks to its own server, and nothing else: injected text stays text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

router = APIRouter(tags=["Page"])


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The live page."""
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return FileResponse(STATIC / "index.html", headers=headers)


@router.get("/live", **describe(streams=True))
async def live(request: Request) -> Response:
    """What the page shows, as server-sent events, a few times a second."""
    return stream_response(request, state_of(request).live.watch())


def mount(app: FastAPI) -> None:
    """Serve the page's files."""
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
