"""Texts as vectors: what `/v1/embeddings`, `/pooling` and `/score` share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from runtime.manifest import EmbeddingInfo
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server import generation, sampling
from runtime.server.errors import ApiError, Kind
from runtime.server.generation import Work
from runtime.server.registry import ServedModel
from runtime.server.state import ServerState

# Texts of one request that are in the engine side by side: a large batch leaves room for others.
_WINDOW = 32


def embedding_info(model: ServedModel) -> EmbeddingInfo:
    """What the model's vectors are. Raises 400 where it has none."""
    info = model.engine.manifest.embedding
    if info is None:
        message = (
            f"the model {model.name!r} has no embedding output: it was built to continue text. Build it with "
            "`task: embed`; `/score` gives the likelihood of a text"
        )
        raise ApiError(Kind.INVALID, message, param="model", code="no_embedding_output")
    return info


def embedding_work(
    model: ServedModel,
    ids: list[int],
    route: str,
    param: str,
    *,
    truncate: int | None = None,
    priority: int | None = None,
    user: str | None = None,
    cache_salt: str | None = None,
) -> Work:
    """The ids in the field `param`, cut to the last `truncate` (-1: what fits), as work for the engine.

    Raises 400 where nothing is left of them, or more than the context holds.
    """
    if truncate is not None:
        ids = ids[-(model.max_context_len if truncate == -1 else truncate) :] if truncate else []
    if not ids:
        cut = ", or `truncate_prompt_tokens` leaves nothing of it" if truncate is not None else ""
        raise sampling.invalid(param, f"is empty{cut}")
    if len(ids) > model.max_context_len:
        message = (
            f"`{param}` has {len(ids)} tokens; the context holds {model.max_context_len} (shorten it, or set "
            "`truncate_prompt_tokens`)"
        )
        raise ApiError(Kind.INVALID, message, param=param, code="context_length_exceeded")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return Work(ids, params, route, priority or 0, user, cache_salt, embed=True)


async def embed_all(state: ServerState, model: ServedModel, works: Sequence[Work]) -> list[RequestOutput]:
    """Each work's result. One failure ends them all."""
    results: list[RequestOutput | None] = [None] * len(works)
    waiting = iter(enumerate(works))

    async def worker() -> None:
        for number, work in waiting:
            async with aclosing(generation.stream(state, model, work)) as outputs:
                async for output in outputs:
                    results[number] = output

    places = min(len(works), _WINDOW, state.admission.limit)
    with state.admission.admit(places):
        workers = [asyncio.ensure_future(worker()) for _ in range(places)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [result for result in results if result is not None]
