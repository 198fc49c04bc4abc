"""Running prompts through an engine: counted, merged, and aborted when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server.registry import ServedModel
from runtime.server.state import ServerState
from runtime.server.tracking import Record

if TYPE_CHECKING:
    from runtime.async_llm import RequestStream


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt for the engine."""

    prompt_token_ids: list[int]
    params: SamplingParams
    route: str
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    embed: bool = False  # for its embedding: nothing is sampled


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


async def stream(state: ServerState, model: ServedModel, work: Work) -> AsyncGenerator[RequestOutput, None]:
    """The engine's deltas for one prompt. Closing the generator aborts the request."""
    record = Record(
        new_id("req-"), model.name, work.route, len(work.prompt_token_ids), work.params, arrival=time.monotonic()
    )
    deltas = _start(model, work, record.request_id)
    state.tracker.start(record)
    try:
        async with aclosing(deltas):
            async for output in deltas:
                state.tracker.observe(record, output)
                model.last_output = time.monotonic()
                yield output
    finally:
        state.tracker.finish(record)


def _start(model: ServedModel, work: Work, request_id: str) -> RequestStream:
    prompt = {"prompt_token_ids": work.prompt_token_ids}
    whose: dict[str, Any] = {
        "request_id": request_id,
        "priority": work.priority,
        "user": work.user,
        "cache_salt": work.cache_salt,
    }
    if work.embed:
        return model.engine.embed(prompt, **whose)
    final = work.params.num_sequences > work.params.n  # which are the best shows only at the end
    return model.engine.generate(prompt, work.params, final=final, **whose)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The deltas of several prompts as they come, each with its prompt's number. One failure ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue()

    async def forward(number: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(source):
                async for output in source:
                    queue.put_nowait((number, output))
        finally:
            queue.put_nowait((number, None))

    tasks = [asyncio.ensure_future(forward(number, source)) for number, source in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, output = await queue.get()
            if output is not None:
                yield number, output
                continue
            running -= 1
            await tasks[number]  # raises what the prompt failed with
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
    """Each prompt's whole result, its sequences in order."""
    results: list[RequestOutput | None] = [None] * len(streams)
    async with aclosing(merged(streams)) as deltas:
        async for number, output in deltas:
            if (whole := results[number]) is None:
                results[number] = output
            else:
                whole.add(output)
    done = [result for result in results if result is not None]
    for result in done:
        result.outputs.sort(key=lambda sequence: sequence.index)
    return done
