"""Running the application in uvicorn: start, drain on the first signal, end at once on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from runtime.errors import PlancastError
from runtime.server import logs
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.http import HttpProtocol
from runtime.server.registry import Loader, ModelRegistry
from runtime.server.state import ServerState

logger = logging.getLogger("plancast.server")

# A batch of streams arrives as one batch of connections: the backlog must hold them.
BACKLOG = 4096
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn with our drain: requests that run may finish, new ones are refused, a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState):
        super().__init__(config)
        self.state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            logger.warning("second signal: ending at once")
        else:
            self.should_exit = True
            self.state.admission.draining = True
            timeout = self.config.timeout_graceful_shutdown
            logger.info("draining", extra={"in_flight": self.state.admission.in_flight, "timeout_s": timeout})

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # As uvicorn's, but the signal is not raised again at the end: a drained server has ended well.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then the engines, whether the drain was whole or cut short."""
        force = self.force_exit
        await super().shutdown(sockets)
        if self.force_exit or force:
            for task in list(self.server_state.tasks):
                task.cancel()
            await self.lifespan.shutdown()


def listen(config: ServerConfig) -> socket.socket | None:
    """The listening socket, or None for a Unix socket. Raises `PlancastError` where the address cannot be had."""
    if config.uds is not None:
        return None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's delay off only for sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise PlancastError(f"cannot listen on {config.host}:{config.port}: {error}") from None
    return listener


def uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        uds=config.uds,
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(0, round(config.shutdown_timeout)),
    )


@asynccontextmanager
async def prepared(
    config: ServerConfig, artifacts: Sequence[tuple[Path, str | None]], load: Loader
) -> AsyncGenerator[tuple[Server, socket.socket | None], None]:
    """A server with its engines loaded, and its listening socket; both are closed at the end.

    Raises `PlancastError` where the address cannot be had, or an artifact refuses to load.
    """
    listener = listen(config)  # before the engines: a port that is taken should not cost a load
    registry = ModelRegistry(load, use_generation_config=config.use_generation_config)
    try:
        for path, name in artifacts:
            await registry.load(path, name)
        app = create_app(config, registry)
        yield Server(uvicorn_config(app, config), app.state.server), listener
    finally:
        await registry.close()
        if listener is not None:
            listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


async def run(config: ServerConfig, artifacts: Sequence[tuple[Path, str | None]], load: Loader) -> None:
    """Load each (artifact, name), then serve until a signal says otherwise. Errors as of `prepared`."""
    async with prepared(config, artifacts, load) as (server, listener):
        models = ", ".join(model.name for model in server.state.registry)
        logger.info("serving %s at %s", models or "no model yet", address(config, listener))
        await server.serve(sockets=[listener] if listener is not None else None)


def address(config: ServerConfig, listener: socket.socket | None) -> str:
    """Where the server can be reached, for people."""
    if listener is None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class IterationLogs:
    """Which file each engine's iteration log goes to: `file` itself where there is one, else one an artifact."""

    def __init__(self, file: Path, num_artifacts: int):
        self._file = file
        self._taken: set[Path] = set()
        self._single = num_artifacts == 1

    def of(self, artifact: Path) -> Path:
        """A file that no other engine writes."""
        if self._single and not self._taken:
            chosen = self._file
        else:
            stem, suffix = f"{self._file.stem}-{artifact.resolve().name}", self._file.suffix
            chosen, number = self._file.with_name(stem + suffix), 2
            while chosen in self._taken:
                chosen, number = self._file.with_name(f"{stem}-{number}{suffix}"), number + 1
        self._taken.add(chosen)
        return chosen


def serve(
    config: ServerConfig,
    artifacts: Sequence[tuple[Path, str | None]],
    engine_options: dict[str, Any],
    iteration_log: Path | None = None,
) -> None:
    """`run` in an event loop of its own. `engine_options` are `AsyncLLM`'s, for every artifact."""
    import uvloop

    from runtime.async_llm import AsyncLLM

    logs.configure(config.log_format, config.log_level)
    iteration_logs = IterationLogs(iteration_log, len(artifacts)) if iteration_log is not None else None

    async def load(path: Path) -> AsyncLLM:
        own = {"iteration_log": str(iteration_logs.of(path))} if iteration_logs is not None else {}
        return await AsyncLLM.start(path, **engine_options, **own)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config, artifacts, load))
