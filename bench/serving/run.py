"""Playing a workload against a server: so many at a time, at a rate, or at a trace's times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.client import Endpoint, Reply, RequestFailed, fetch, stream
from bench.serving.workload import Ask
from runtime.errors import PlancastError

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a server, and how it is asked."""

    endpoint: Endpoint
    model: str
    api: str = "completions"  # completions | chat
    extra: dict[str, Any] | None = None  # more fields for each body
    ignore_eos: bool = True  # answers of exactly the length that is asked for, where the server knows the field

    def body(self, ask: Ask, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": ask.output_tokens, "temperature": 0.0, "seed": seed}
        if self.api == "chat":
            system = [{"role": "system", "content": ask.system}] if ask.system else []
            body["messages"] = [*system, {"role": "user", "content": ask.prompt}]
        else:
            prompt = ask.prompt
            body["prompt"] = f"{ask.system}{prompt}" if ask.system else prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | (self.extra or {})


async def find_model(endpoint: Endpoint, wanted: str | None) -> str:
    """The model to ask for: `wanted`, or the server's first. Raises `PlancastError` where there is no server."""
    if wanted is not None:
        return wanted
    try:
        models = (await fetch(endpoint, "GET", "/v1/models"))["data"]
        return models[0]["id"]
    except (RequestFailed, KeyError, IndexError, TypeError) as error:
        raise PlancastError(
            f"{endpoint.url} lists no model ({error}); is a server there? Name one with --model"
        ) from None


async def play(
    target: Target,
    asks: Sequence[Ask],
    *,
    concurrency: int | None,
    arrivals: Sequence[float] | None,
    seed: int = 0,
    on_reply: Callable[[Reply], None] = lambda _: None,
) -> tuple[list[Reply], float, float]:
    """Ask everything: (replies in order, `time.perf_counter()` of the start, seconds in all).

    `concurrency` bounds the requests under way (None: no bound). `arrivals`: when each is due, in seconds after the
    start (None: at once). A request that is due while no place is free waits for one, and its latency does not count
    the wait, as in vLLM.
    """
    places = asyncio.Semaphore(concurrency) if concurrency is not None else None
    replies: list[Reply | None] = [None] * len(asks)
    route = ROUTES[target.api]

    async def one(number: int) -> None:
        reply = await stream(target.endpoint, route, target.body(asks[number], seed + number))
        replies[number] = reply
        on_reply(reply)

    async def held(number: int) -> None:
        assert places is not None
        try:
            await one(number)
        finally:
            places.release()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(len(asks)):
            if arrivals is not None and (wait := begin + arrivals[number] - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if places is None:
                tasks.create_task(one(number))
            else:
                await places.acquire()
                tasks.create_task(held(number))
    seconds = time.perf_counter() - begin
    return [reply for reply in replies if reply is not None], begin, seconds


async def warm_up(target: Target, asks: Sequence[Ask]) -> None:
    """Ask these one after another and forget the answers. Raises `PlancastError` where one fails."""
    for number, ask in enumerate(asks):
        reply = await stream(target.endpoint, ROUTES[target.api], target.body(ask, number))
        if reply.error is not None:
            strict = target.ignore_eos and "ignore_eos" in reply.error
            hint = "; this server does not know ignore_eos: --no-ignore-eos leaves it out" if strict else ""
            raise PlancastError(f"the first request failed, and so would the others: {reply.error}{hint}")
