"""A real server for tests: uvicorn in a thread, the engine in another, requests over a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from runtime.async_llm import AsyncLLM
from runtime.messages import EngineStats
from runtime.server.config import ServerConfig
from runtime.server.run import Server, prepared
from runtime.server.state import ServerState

T = TypeVar("T")

TIMEOUT_S = 30.0


class ServerThread:
    """Serves artifacts on a free port of 127.0.0.1 from `start` to `stop` (or within `with`).

    `factory` opens the executor; `options` are `AsyncLLM`'s.
    """

    def __init__(
        self,
        artifacts: dict[str, Path],
        config: ServerConfig | None = None,
        *,
        factory: str = "tiny_served:open_hash",
        factory_args: dict[str, Any] | None = None,
        in_process: bool = True,
        **options: Any,
    ):
        self.config = config or ServerConfig(port=0)
        self._artifacts = [(path, name) for name, path in artifacts.items()]
        self._load = partial(
            AsyncLLM.start,
            in_process=in_process,
            executor_factory=factory,
            executor_args=factory_args or {},
            **options,
        )
        self.url = "http://server"  # a Unix socket's; else known once the server listens
        self._started: Future[tuple[Server, str, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="test-server", daemon=True)

    async def _run(self) -> None:
        try:
            async with prepared(self.config, self._artifacts, self._load) as (server, listener):
                url = self.url
                if listener is not None:
                    scheme = "https" if self.config.ssl_certfile else "http"
                    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
                self._started.set_result((server, url, asyncio.get_running_loop()))
                await server.serve(sockets=[listener] if listener is not None else None)
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                raise

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self.server, self.url, self._loop = self._started.result(TIMEOUT_S)
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not end"

    @property
    def state(self) -> ServerState:
        return self.server.state

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def engine(self, name: str | None = None) -> AsyncLLM:
        return self.state.registry.get(name).engine

    def stats(self, name: str | None = None, **options: Any) -> EngineStats:
        return self.call(self.engine(name).stats(**options))

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)


def wait_until(condition: Callable[[], Any], timeout: float = TIMEOUT_S) -> None:
    """Poll until `condition()` holds. Fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.005)
