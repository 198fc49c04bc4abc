"""The models that a server holds: engines by name, loaded and unloaded while it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import PlancastError
from runtime.sampling_params import SamplingParams
from runtime.server.errors import ApiError, Kind

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM

logger = logging.getLogger("plancast.server")


# What TGI's clients send where the server holds one model, whatever its name.
_ANY_MODEL = frozenset({"tgi", "dummy"})


@dataclass(slots=True)
class ServedModel:
    """One engine under its name, with the sampling that its makers recommend."""

    name: str
    engine: AsyncLLM
    path: Path | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    last_output: float = float("-inf")  # when the engine last answered, `time.monotonic()`

    @property
    def max_context_len(self) -> int:
        return self.engine.max_context_len


Loader = Callable[[Path], Awaitable["AsyncLLM"]]


class ModelRegistry:
    """Models by name. `load` opens an artifact; loading and unloading take turns."""

    def __init__(self, load: Loader, *, use_generation_config: bool = True):
        self._load = load
        self._use_generation_config = use_generation_config
        self._models: dict[str, ServedModel] = {}
        self._turn = asyncio.Lock()

    def __iter__(self):
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def get(self, name: str | None) -> ServedModel:
        """The model called `name`; the only one where there is no choice and no name. Raises 404 or 400."""
        if name is not None and (model := self._models.get(name)) is not None:
            return model
        if (name is None or name in _ANY_MODEL) and len(self._models) == 1:
            return next(iter(self._models.values()))
        held = ", ".join(self._models) or "none"
        if name is None:
            message = f"`model` is required: this server holds {len(self._models)} models ({held})"
            raise ApiError(Kind.INVALID, message, param="model", code="missing_required_parameter")
        message = f"the model {name!r} does not exist; this server holds: {held}"
        raise ApiError(Kind.NOT_FOUND, message, param="model", code="model_not_found")

    def add(self, name: str, engine: AsyncLLM, path: Path | None = None) -> ServedModel:
        if name in self._models:
            raise ApiError(Kind.CONFLICT, f"a model called {name!r} is already loaded", param="name")
        sampling = engine.default_sampling_params() if self._use_generation_config else SamplingParams()
        model = self._models[name] = ServedModel(name, engine, path, default_sampling=sampling)
        return model

    async def load(self, path: Path, name: str | None = None) -> ServedModel:
        """Open the artifact at `path` and serve it as `name` (default: its manifest's). Raises `ArtifactError`."""
        async with self._turn:
            if name is not None and name in self._models:
                raise ApiError(Kind.CONFLICT, f"a model called {name!r} is already loaded", param="name")
            started = time.perf_counter()
            engine = await self._load(path)
            try:
                model = self.add(name or engine.manifest.name, engine, path)
            except (ApiError, PlancastError):
                await engine.close()
                raise
            logger.info("loaded", extra={"model": model.name, "s": round(time.perf_counter() - started, 2)})
            return model

    async def unload(self, name: str) -> None:
        """Stop serving `name`: no new requests at once, then the engine ends, and its requests with it."""
        async with self._turn:
            model = self.get(name)
            del self._models[name]
            await model.engine.close()
            logger.info("unloaded", extra={"model": name})

    async def close(self) -> None:
        """Close every engine."""
        for model in list(self):
            await self.unload(model.name)
