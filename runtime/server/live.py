"""The live page's feed: a snapshot of the server a few times a second, made once for all who watch."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any

from runtime.server import sse

if TYPE_CHECKING:
    from runtime.messages import EngineStats
    from runtime.server.registry import ServedModel
    from runtime.server.state import ServerState

INTERVAL_S = 0.25
# A map of more blocks than this is drawn (and its states collected) once in so many snapshots.
_LARGE_MAP = 8192
_LARGE_MAP_EVERY = 4
_RATE_WINDOW_S = 3.0
_MAX_REQUESTS = 64  # rows on the page

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # the chat box's defaults

# Histogram bounds, seconds.
TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TPOT_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


def histogram(values: Iterable[float], bounds: tuple[float, ...]) -> dict[str, Any]:
    """Counts below each bound (the last: beyond all), and the median and 95th percentile."""
    ordered = sorted(values)
    counts = [0] * (len(bounds) + 1)
    at = 0
    for value in ordered:
        while at < len(bounds) and value > bounds[at]:
            at += 1
        counts[at] += 1
    return {"bounds": bounds, "counts": counts, "p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95)}


def percentile(ordered: list[float], share: float) -> float | None:
    """The nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


class LiveFeed:
    """Snapshots as encoded events. Made only while somebody watches; who reads slowly misses some."""

    def __init__(self, state: ServerState):
        self.state = state
        self.started = time.monotonic()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest = b""
        self._changed = asyncio.Event()
        self._rates: deque[tuple[float, int]] = deque()
        self._maps: dict[str, str] = {}
        self._ticks = 0

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events from now on."""
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield await self._event()
            while True:
                await self._changed.wait()
                yield self._latest
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._latest = await self._event()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _event(self) -> bytes:
        return sse.data(await self.snapshot())

    async def snapshot(self) -> dict[str, Any]:
        """Everything that the page shows."""
        tracker = self.state.tracker
        now = time.monotonic()
        models = [self._model(model, stats) for model, stats in (await self._stats()).values()]
        active = sorted(tracker.active.values(), key=lambda record: record.arrival)
        return {
            "uptime": round(now - self.started, 1),
            "draining": self.state.admission.draining,
            "models": models,
            "in_flight": len(active),
            "requests": [
                {
                    "id": record.request_id[4:12],
                    "model": record.model,
                    "route": record.route,
                    "running": record.scheduled is not None or record.first_token is not None,
                    "age": round(now - record.arrival, 2),
                    "prompt": record.prompt_tokens,
                    "cached": record.cached_tokens,
                    "output": record.output_tokens,
                    "max": (record.params.max_tokens or 0) * record.params.num_sequences,
                }
                for record in active[:_MAX_REQUESTS]
            ],
            "tokens_per_second": self._rate(now, tracker.output_tokens),
            "ttft": histogram(tracker.recent_ttft, TTFT_BOUNDS),
            "tpot": histogram(tracker.recent_tpot, TPOT_BOUNDS),
        }

    async def _stats(self) -> dict[str, tuple[ServedModel, EngineStats]]:
        large = any(len(states) > _LARGE_MAP for states in self._maps.values())
        with_blocks = not large or self._ticks % _LARGE_MAP_EVERY == 0
        self._ticks += 1
        return await self.state.stats(with_blocks=with_blocks)

    def _model(self, model: ServedModel, stats: EngineStats) -> dict[str, Any]:
        if stats.block_states:
            self._maps[model.name] = base64.b64encode(stats.block_states).decode()
        manifest = model.engine.manifest
        return {
            "name": model.name,
            "backend": f"{manifest.backend.name} {manifest.backend.device}",
            "context": model.max_context_len,
            "chat": model.engine.chat_template is not None,
            "sampling": {name: getattr(model.default_sampling, name) for name in _SAMPLING},
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "blocks": stats.num_blocks,
            "free": stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "block_size": stats.block_size,
            "bytes_per_block": manifest.kv.bytes_per_block,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "prefix_queries": stats.prefix_cache_queries,
            "prefix_hits": stats.prefix_cache_hits,
            "draft_tokens": stats.spec_decode_num_draft_tokens,
            "accepted_tokens": stats.spec_decode_num_accepted_tokens,
            "drafts": stats.spec_decode_num_drafts,
            "draft_share": round(stats.spec_decode_draft_seconds / stats.step_seconds, 4)
            if stats.step_seconds
            else 0.0,
            "speculation": stats.speculation_enabled,
            "map": self._maps.get(model.name, ""),
        }

    def _rate(self, now: float, tokens: int) -> float:
        """Output tokens a second over the last few seconds."""
        self._rates.append((now, tokens))
        while len(self._rates) > 2 and now - self._rates[0][0] > _RATE_WINDOW_S:
            self._rates.popleft()
        then, before = self._rates[0]
        span = now - then
        return round((tokens - before) / span, 1) if span > 0 else 0.0
