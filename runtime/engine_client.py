"""The client's view of an engine: one interface, whether the core runs in a thread here or in a process of its own.

An engine reports to a `Listener`, from one thread of its own. `InProcessEngine` is here; `ProcessEngine`, which
survives the death of its core, in `runtime/client/process_engine.py`.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from runtime import errors
from runtime.engine_loop import EngineLoop, refusal
from runtime.engine_process import EngineSpec, failure, open_engine
from runtime.errors import EngineDeadError, PlancastError
from runtime.messages import (
    AbortRequests,
    EngineFailure,
    EngineRequest,
    EngineStats,
    FromEngine,
    Ready,
    RequestDelta,
    Shutdown,
    StepOutputs,
    ToEngine,
    Utility,
    UtilityReply,
)

logger = logging.getLogger("plancast.engine")

SHUT_DOWN = "the engine was shut down before the request ended"
# Deaths of an engine's process, within a window of time, that are mended.
MAX_RESTARTS = 3
# A step that takes longer hangs: then the process is killed and replaced.
STEP_TIMEOUT_S = 300.0
# A shutdown may take this long over its drain time: a step in progress ends first.
STOP_GRACE_S = 10.0


class Listener(Protocol):
    """Who gets the answers. Called from the engine's thread: be quick, and raise nothing."""

    def on_outputs(self, deltas: list[RequestDelta]) -> AbortRequests | None:
        """Take what is new; return what the engine need not go on with (stop strings)."""
        ...

    def resume_request(self, request_id: str) -> EngineRequest:
        """The request with the tokens that `on_outputs` was given so far."""
        ...


class EngineClient(Protocol):
    """A loaded engine. Every method may be called from any thread."""

    ready: Ready  # what the core said when it had loaded; the latest core, where it was replaced

    def wait_ready(self) -> None:
        """Wait until the core has loaded. Raises what loading raises."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often the core's process was replaced."""
        ...

    def add_request(self, request: EngineRequest) -> None:
        """Hand a request over. Raises `EngineDeadError` where the engine is dead or closed."""
        ...

    def abort(self, message: AbortRequests) -> None:
        """End requests, or single sequences: nothing more is reported of them."""
        ...

    def call(self, method: str, **args: Any) -> Future[Any]:
        """Ask the core ("stats", "reset_prefix_cache", "ping"). The future may raise `EngineDeadError`."""
        ...

    def close(self, drain_s: float = 0.0) -> None:
        """Let running requests go on for at most `drain_s` seconds, end the others, and free everything. Idempotent."""
        ...


def failure_error(message: EngineFailure) -> PlancastError:
    """The very error that the core raised."""
    error_class = getattr(errors, message.error_class, EngineDeadError)
    return error_class(message.error)


def failed(request_ids: Iterable[str], error: str) -> list[RequestDelta]:
    """The end of requests whose engine is gone."""
    return [delta for request_id in request_ids for delta in refusal(request_id, error, "engine").deltas]


class Calls:
    """Calls that wait for their reply. Thread-safe."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[Utility, Future[Any]]] = {}

    def new(self, method: str, args: dict[str, Any]) -> tuple[Utility, Future[Any]]:
        message, future = Utility(call_id=next(self._ids), method=method, args=args), Future[Any]()
        self._waiting[message.call_id] = message, future
        return message, future

    def waiting(self) -> list[Utility]:
        return [message for message, _ in list(self._waiting.values())]

    def resolve(self, reply: UtilityReply) -> Utility | None:
        """Hand the reply to whoever waits, and return the call that it answers."""
        message, future = self._waiting.pop(reply.call_id, (None, None))
        if future is not None and future.set_running_or_notify_cancel():
            if reply.error is not None:
                future.set_exception(PlancastError(reply.error))
            else:
                future.set_result(reply.result)
        return message

    def fail(self, error: Exception) -> None:
        for call_id in list(self._waiting):
            _, future = self._waiting.pop(call_id)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class InProcessEngine:
    """An engine in a thread of this process: no process to start, and none to lose.

    If the executor fails in a step, every request ends with `EngineDeadError` and the engine is dead. Raises whatever
    `open_engine` raises.
    """

    num_restarts = 0
    ready: Ready

    def __init__(self, spec: EngineSpec, listener: Listener, *, wait: bool = True):
        self._listener = listener
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._unfinished: dict[str, None] = {}
        self._calls = Calls()
        self._lock = threading.RLock()  # reentrant: a collected stream may abort in mid-call
        self._error: PlancastError | None = None
        self._loaded: Future[Ready] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(spec, self._loaded), name="plancast-engine", daemon=True
        )
        self._thread.start()
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        try:
            self.ready = self._loaded.result()
        except BaseException:  # Ctrl-C while loading, too: the thread ends as soon as it can
            self._inbox.put(Shutdown())
            raise

    @property
    def is_alive(self) -> bool:
        return self._error is None

    def add_request(self, request: EngineRequest) -> None:
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(str(self._error))
            self._unfinished[request.request_id] = None
        self._inbox.put(request)

    def abort(self, message: AbortRequests) -> None:
        with self._lock:
            for request_id in message.request_ids:
                self._unfinished.pop(request_id, None)
        self._inbox.put(message)

    def call(self, method: str, **args: Any) -> Future[Any]:
        message, future = self._calls.new(method, args)
        self._inbox.put(message)
        if self._error is not None:
            self._calls.fail(self._error)
        return future

    def close(self, drain_s: float = 0.0) -> None:
        with self._lock:
            if self._error is None:
                self._error = EngineDeadError("the engine was shut down")
        self._inbox.put(Shutdown(drain_s=drain_s))
        if self._thread is not threading.current_thread():
            self._thread.join(drain_s + STOP_GRACE_S)

    def _run(self, spec: EngineSpec, loaded: Future[Ready]) -> None:
        try:
            engine = open_engine(spec)
        except BaseException as error:
            # The thread's own reference to the failed load must not keep its memory.
            loaded.set_exception(error)
            del loaded
            return
        reason = SHUT_DOWN
        try:
            loaded.set_result(engine.ready)
            EngineLoop(engine.core, _QueueChannel(self._inbox, self._take)).run()
        except Exception as error:
            message = failure(error, "running a step")
            logger.debug("%s", message.traceback)
            reason = message.error
        finally:
            engine.close()
            with self._lock:
                self._error = self._error or EngineDeadError(reason)
                unfinished, self._unfinished = list(self._unfinished), {}
            self._listener.on_outputs(failed(unfinished, reason))
            self._calls.fail(self._error)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(deltas=deltas):
                with self._lock:
                    deltas = [delta for delta in deltas if delta.request_id in self._unfinished]
                    for delta in deltas:
                        if delta.finished:
                            del self._unfinished[delta.request_id]
                aborts = self._listener.on_outputs(deltas)
                if aborts is not None:
                    self.abort(aborts)
            case UtilityReply():
                self._calls.resolve(message)


class _QueueChannel:
    """A `Channel` within one process."""

    def __init__(self, inbox: queue.SimpleQueue[ToEngine], take: Any):
        self._inbox = inbox
        self.send = take

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            if timeout:
                messages.append(self._inbox.get(timeout=timeout))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages


# What rises and falls; everything else in EngineStats only grows.
_GAUGES = {
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_spilled_blocks",
    "peak_used_blocks",
    "block_size",
    "block_states",
    "speculation_enabled",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_COUNTERS = [name for name in EngineStats.__struct_fields__ if name not in _GAUGES and name != _PER_POSITION]


def add_counters(stats: EngineStats, earlier: EngineStats) -> EngineStats:
    """`stats` with the counters of cores that died before on top, so that counters only grow."""
    sums: dict[str, Any] = {name: getattr(stats, name) + getattr(earlier, name) for name in _COUNTERS}
    both = itertools.zip_longest(getattr(stats, _PER_POSITION), getattr(earlier, _PER_POSITION), fillvalue=0)
    sums[_PER_POSITION] = [now + before for now, before in both]
    return msgspec.structs.replace(stats, **sums)
