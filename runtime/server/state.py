"""What every route needs, in one place: `request.app.state.server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from runtime.server.admission import Admission
from runtime.server.config import ServerConfig
from runtime.server.live import LiveFeed
from runtime.server.metrics import Metrics
from runtime.server.registry import ModelRegistry
from runtime.server.responses_store import ResponseStore
from runtime.server.tracing import Tracer
from runtime.server.tracking import Tracker

if TYPE_CHECKING:
    from runtime.messages import EngineStats
    from runtime.server.registry import ServedModel


class ServerState:
    """One server: its configuration, models, and everything that is counted."""

    def __init__(self, config: ServerConfig, registry: ModelRegistry):
        self.config = config
        self.registry = registry
        self.metrics = Metrics()
        self.tracer = Tracer(config.otlp_endpoint) if config.otlp_endpoint is not None else None
        self.tracker = Tracker(self.metrics, self.tracer)
        self.responses = ResponseStore()
        self.live = LiveFeed(self)
        self.admission = Admission(config.max_concurrent_requests, self.tracker)

    async def stats(self, *, with_blocks: bool = False) -> dict[str, tuple[ServedModel, EngineStats]]:
        """Each model with its engine's snapshot; a model whose engine does not answer is left out."""
        from runtime.errors import PlancastError

        found = {}
        for model in self.registry:
            try:
                found[model.name] = (model, await model.engine.stats(with_blocks=with_blocks))
            except PlancastError:
                continue
        return found


def state_of(request: Request) -> ServerState:
    return request.app.state.server


def log_extras(request: Request, **extras: Any) -> None:
    """Add to the request's log line."""
    request.scope["state"]["log"].update(extras)
