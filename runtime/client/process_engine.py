"""An engine in a process of its own that outlives the death of its core.

One thread owns the process, its socket and all bookkeeping; the other threads put commands into a queue. When the
process dies, the thread starts a new one and hands every unfinished request over again, with the tokens that were
delivered: streams go on where they stopped. A request that kills one process after the other is found (see
`runtime/client/quarantine.py`) and refused alone.

A request's life here: queued as a command -> held, while no process is up or a search is on -> given to the core,
under another id each time, so that late answers to an earlier time fall on the floor -> forgotten when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from runtime.client.child import EngineChild
from runtime.client.quarantine import Quarantine
from runtime.client.restarts import Convicts, RestartBudget
from runtime.engine_client import (
    MAX_RESTARTS,
    SHUT_DOWN,
    STOP_GRACE_S,
    Calls,
    Listener,
    add_counters,
    failed,
    failure_error,
    logger,
)
from runtime.engine_loop import refusal
from runtime.engine_process import EngineSpec
from runtime.errors import EngineDeadError, PlancastError, RequestError
from runtime.messages import (
    AbortRequests,
    EngineFailure,
    EngineRequest,
    EngineStats,
    FromEngine,
    Ready,
    Shutdown,
    StepOutputs,
    Utility,
    UtilityReply,
)

RESTART_WINDOW_S = 300.0
# Before another try, when the new process died as well before it was up.
_RETRY_WAIT_S = 0.5
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Record:
    """An unfinished request."""

    request_id: str
    encoded: bytes | None  # as first submitted, until it is given for the first time
    times_given: int = 0
    core_id: str | None = None  # its id in the core; None: the core does not have it now


class ProcessEngine:
    """An `EngineClient` over a process. See the module's docstring.

    Args:
        spec: what to open.
        listener: who gets the answers, and knows what was delivered.
        max_restarts: deaths within `restart_window_s` seconds that are mended; one more, and every request ends with
            `EngineDeadError`. Deaths on the search for a culprit do not count, nor do those it is convicted of.
        wait: False: loading goes on while the caller does something else, and then calls `wait_ready`.

    Raises:
        PlancastError: the engine does not load, in the very words of the core.
    """

    ready: Ready

    def __init__(
        self,
        spec: EngineSpec,
        listener: Listener,
        *,
        max_restarts: int = MAX_RESTARTS,
        restart_window_s: float = RESTART_WINDOW_S,
        wait: bool = True,
    ):
        self._spec = spec
        self._listener = listener
        self._owner_pid = os.getpid()
        # Guards _error, and the queue and waker against their end. Reentrant: a collected stream may abort in mid-call.
        self._lock = threading.RLock()
        self._error: str | None = None
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls = Calls()
        self._convicts = Convicts()
        self.num_restarts = 0

        # From here on the thread's alone.
        self._child: EngineChild | None = None
        self._is_up = False
        self._failure: EngineFailure | None = None
        self._records: dict[str, _Record] = {}
        self._held: dict[str, _Record] = {}  # those that the core does not have
        self._by_core_id: dict[str, _Record] = {}
        self._sent_calls: set[int] = set()
        self._quarantine = Quarantine()
        self._budget = RestartBudget(max_restarts, restart_window_s)
        self._start_at = 0.0
        self._close_by: float | None = None  # monotonic; set once shutting down
        self._counted = EngineStats()  # counters of the cores that died
        self._latest = EngineStats()

        self._first_ready: Future[Ready] = Future()
        self._thread = threading.Thread(target=self._run, name="plancast-engine-client", daemon=True)
        self._thread.start()
        if wait:
            self.wait_ready()

    # Any thread

    def wait_ready(self) -> None:
        try:
            self.ready = self._first_ready.result()
        except BaseException:  # Ctrl-C while loading, too
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._error is None

    def add_request(self, request: EngineRequest) -> None:
        if request in self._convicts:
            raise RequestError("a request like this one crashed the engine, again and again: it is refused")
        try:
            encoded = _encode(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        self._put(_Record(request.request_id, encoded))

    def abort(self, message: AbortRequests) -> None:
        self._put(message, raises=False)

    def call(self, method: str, **args: Any) -> Future[Any]:
        message, future = self._calls.new(method, args)
        if not self._put(message, raises=False):
            self._calls.fail(EngineDeadError(self._error or ""))
        return future

    def close(self, drain_s: float = 0.0) -> None:
        if os.getpid() != self._owner_pid:
            return  # a fork of the owner: the process is not its own to end
        with self._lock:
            self._error = self._error or "the engine was shut down"
        self._put(Shutdown(drain_s=drain_s), raises=False, even_if_dead=True)
        if self._thread is not threading.current_thread():
            self._thread.join(drain_s + 2 * STOP_GRACE_S)

    def _put(self, command: Any, *, raises: bool = True, even_if_dead: bool = False) -> bool:
        with self._lock:
            if self._waker >= 0 and (self._error is None or even_if_dead or isinstance(command, AbortRequests)):
                self._commands.put(command)
                os.eventfd_write(self._waker, 1)
                return True
        if raises:
            raise EngineDeadError(self._error or "the engine was shut down")
        return False

    # The thread

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        end = EngineDeadError(SHUT_DOWN)
        try:
            while not self._is_over():
                if self._child is None and time.monotonic() >= self._start_at:
                    self._child = self._start(context)
                self._wait()
        except PlancastError as error:
            end = error
        except Exception as error:  # ours to mend, but the requests must not wait for ever
            logger.exception("the engine's client failed")
            end = EngineDeadError(f"the engine's client failed: {type(error).__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.close()
            context.term()
            self._end(end)

    def _start(self, context: zmq.Context[Any]) -> EngineChild:
        try:
            return EngineChild(context, self._next_spec())
        except OSError as error:
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from None

    def _next_spec(self) -> EngineSpec:
        """What the next process opens. Each writes an iteration log of its own, beside the first one."""
        log = self._spec.config.iteration_log
        if log is None or not self.num_restarts:
            return self._spec
        stem, suffix = os.path.splitext(log)
        config = msgspec.structs.replace(self._spec.config, iteration_log=f"{stem}.restart-{self.num_restarts}{suffix}")
        return msgspec.structs.replace(self._spec, config=config)

    def _is_over(self) -> bool:
        if self._close_by is None:
            return False
        return self._child is None or not self._is_up or time.monotonic() >= self._close_by

    def _wait(self) -> None:
        """Wait for something to happen, and act on it."""
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        child = self._child
        if child is not None:
            poller.register(child.socket, zmq.POLLIN)
            if child.exit_fd >= 0:
                poller.register(child.exit_fd, zmq.POLLIN)
        events = dict(poller.poll(self._patience_ms()))
        if self._waker in events:
            self._take_commands()
        if child is None:
            return
        has_exited = child.exit_fd in events or (child.exit_fd < 0 and child.has_exited())
        for message in child.receive_last() if has_exited else child.receive():
            self._take(message)
        if has_exited:
            self._bury(child)

    def _patience_ms(self) -> int | None:
        now = time.monotonic()
        if self._close_by is not None:
            return max(0, int((self._close_by - now) * 1000)) + 1
        if self._child is None:
            return max(0, int((self._start_at - now) * 1000)) + 1
        return 1000 if self._child.exit_fd < 0 else None

    def _take_commands(self) -> None:
        os.eventfd_read(self._waker)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            match command:
                case _Record():
                    self._records[command.request_id] = self._held[command.request_id] = command
                    self._give()
                case AbortRequests():
                    self._abort(command)
                case Utility():
                    self._send_calls()
                case Shutdown():
                    self._shut_down(command)

    def _shut_down(self, command: Shutdown) -> None:
        close_by = time.monotonic() + command.drain_s + STOP_GRACE_S
        self._close_by = close_by if self._close_by is None else min(self._close_by, close_by)
        if self._child is not None and self._is_up:
            self._child.send(_encode(command))

    def _abort(self, message: AbortRequests) -> None:
        core_ids, sequences = [], []
        for request_id in message.request_ids:
            record = self._records.get(request_id)
            if record is not None:
                if record.core_id is not None:
                    core_ids.append(record.core_id)
                self._forget(record)
        for request_id, index in message.sequences:
            record = self._records.get(request_id)
            if record is not None and record.core_id is not None:
                sequences.append((record.core_id, index))
        if (core_ids or sequences) and self._child is not None:
            self._child.send(_encode(AbortRequests(core_ids, sequences)))
        self._give()

    def _give(self) -> None:
        """Hand the core what it may have and does not have."""
        if not self._is_up or self._child is None or self._close_by is not None:
            return
        for record in [record for record in self._held.values() if self._quarantine.may_run(record.request_id)]:
            encoded = record.encoded
            core_id = record.request_id
            if encoded is None:
                try:
                    request = self._listener.resume_request(record.request_id)
                except KeyError:  # its abort is on the way
                    self._forget(record)
                    continue
                core_id = f"{record.request_id}~{record.times_given}"
                encoded = _encode(msgspec.structs.replace(request, request_id=core_id))
            record.encoded, record.core_id = None, core_id
            record.times_given += 1
            self._by_core_id[core_id] = record
            del self._held[record.request_id]
            self._child.send(encoded)
            self._quarantine.started(record.request_id)

    def _take_back(self, record: _Record) -> None:
        """The core does not have it any more, and it is not over."""
        if record.core_id is not None:
            self._by_core_id.pop(record.core_id, None)
            record.core_id = None
        self._held[record.request_id] = record

    def _forget(self, record: _Record) -> None:
        if record.core_id is not None:
            self._by_core_id.pop(record.core_id, None)
        self._records.pop(record.request_id, None)
        self._held.pop(record.request_id, None)
        self._quarantine.ended(record.request_id)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._deliver(message)
            case UtilityReply():
                self._reply(message)
            case Ready():
                self._up(message)
            case EngineFailure():
                self._failure = message
                if message.traceback:
                    logger.debug("%s", message.traceback)

    def _up(self, ready: Ready) -> None:
        assert self._child is not None
        self._child.connected()
        self._is_up = True
        self.ready = ready
        # Another core must hold what this one did, however much memory is free then.
        config = msgspec.structs.replace(self._spec.config, num_blocks=ready.num_blocks)
        self._spec = msgspec.structs.replace(self._spec, config=config)
        if not self._first_ready.done():
            self._first_ready.set_result(ready)
        self._sent_calls.clear()
        self._send_calls()
        self._give()

    def _deliver(self, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self._latest = outputs.stats
        deltas, cleared = [], []
        for delta in outputs.deltas:
            record = self._by_core_id.get(delta.request_id)
            if record is None:
                continue  # aborted, or of an earlier time
            delta.request_id = record.request_id
            deltas.append(delta)
            if delta.finished:
                self._forget(record)
            elif any(sequence.new_token_ids for sequence in delta.sequences) and self._quarantine.went_on(
                record.request_id
            ):
                cleared.append(record)
        aborts = self._listener.on_outputs(deltas)
        for record in cleared:
            if record.core_id is not None and self._child is not None:
                self._child.send(_encode(AbortRequests([record.core_id])))
                self._take_back(record)
        self._abort(aborts or AbortRequests([]))

    def _send_calls(self) -> None:
        if not self._is_up or self._child is None:
            return
        for message in self._calls.waiting():
            if message.call_id not in self._sent_calls:
                self._sent_calls.add(message.call_id)
                self._child.send(_encode(message))

    def _reply(self, reply: UtilityReply) -> None:
        self._sent_calls.discard(reply.call_id)
        # On the wire a result has lost its type; only statistics come as a map.
        if isinstance(reply.result, dict):
            self._latest = msgspec.convert(reply.result, EngineStats)
            reply.result = add_counters(self._latest, self._counted)
        self._calls.resolve(reply)

    def _bury(self, child: EngineChild) -> None:
        """The process is gone: find out what that means, and arrange for the next one."""
        child.close()
        was_up, self._is_up, self._child = self._is_up, False, None
        death = f"the engine process {child.describe_exit()}"
        if self._failure is not None:
            death = f"{death}: {self._failure.error}"
        if not self._first_ready.done():
            raise failure_error(self._failure) if self._failure is not None else EngineDeadError(f"{death} on loading")
        self._failure = None
        if self._close_by is not None:
            return
        self._counted = add_counters(self._latest, self._counted)
        self._latest = EngineStats()
        convicted, was_explained = self._quarantine.crashed()
        for record in self._records.values():
            self._take_back(record)
        self._held = dict(self._records)  # in the order of arrival again
        if convicted is not None:
            self._refuse(self._records[convicted], death)
            self._budget.forgive()
        elif not was_explained:
            self._budget.spend(death)
        self.num_restarts += 1
        self._start_at = 0.0 if was_up else time.monotonic() + _RETRY_WAIT_S
        level = logging.WARNING if not was_explained else logging.INFO
        logger.log(level, "%s; starting it again, %d requests go on", death, len(self._records))

    def _refuse(self, record: _Record, death: str) -> None:
        with contextlib.suppress(KeyError):  # its abort is on the way
            self._convicts.add(self._listener.resume_request(record.request_id))
        self._forget(record)
        text = f"this request crashes the engine, again and again and with no other beside it, and is refused ({death})"
        logger.error("request %s: %s", record.request_id, text)
        self._listener.on_outputs(refusal(record.request_id, text, "request").deltas)

    def _end(self, error: PlancastError) -> None:
        """Nothing comes any more: tell everyone who waits."""
        with self._lock:
            self._error = self._error or str(error)
            os.close(self._waker)
            self._waker = -1
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, _Record):
                self._records[command.request_id] = command
        unfinished, self._records = list(self._records), {}
        self._listener.on_outputs(failed(unfinished, str(error)))
        self._calls.fail(EngineDeadError(str(error)))
        if not self._first_ready.done():
            self._first_ready.set_exception(error)
