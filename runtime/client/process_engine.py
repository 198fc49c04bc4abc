"""An engine in a process of its own that outlives the death of its core.

One thread owns the process, its socket and all bookkeeping; the other threads put commands into a queue. When the
process dies, the thread starts a new one and hands every unfinished request over again, with the tokens that were
delivered: streams go on where they stopped (`runtime/client/ledger.py` knows them). A process that hangs is killed and
replaced like one that died (`runtime/client/watchdog.py`). A request that kills one process after the other is found
(`runtime/client/quarantine.py`) and refused alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from runtime.client.child import EngineChild
from runtime.client.commands import CommandQueue
from runtime.client.ledger import Ledger, Record
from runtime.client.quarantine import Quarantine
from runtime.client.restarts import Convicts, RestartBudget
from runtime.client.watchdog import Watchdog
from runtime.engine_client import (
    MAX_RESTARTS,
    SHUT_DOWN,
    STEP_TIMEOUT_S,
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


class ProcessEngine:
    """An `EngineClient` over a process. See the module's docstring.

    Args:
        spec: what to open.
        listener: who gets the answers, and knows what was delivered.
        max_restarts: deaths within `restart_window_s` seconds that are mended; one more, and every request ends with
            `EngineDeadError`. Deaths on the search for a culprit do not count, nor do those it is convicted of.
        step_timeout_s: a process that does not finish a step for so long hangs and is replaced; None: it may take ever
            so long.
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
        step_timeout_s: float | None = STEP_TIMEOUT_S,
        wait: bool = True,
    ):
        self._spec = spec
        self._listener = listener
        self._owner_pid = os.getpid()
        self._commands = CommandQueue()
        self._calls = Calls()
        self._convicts = Convicts()
        self.num_restarts = 0

        # From here on the thread's alone.
        self._child: EngineChild | None = None
        self._is_up = False
        self._failure: EngineFailure | None = None
        self._ledger = Ledger()
        self._watchdog = Watchdog(step_timeout_s)
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
        return self._commands.refusal is None

    def add_request(self, request: EngineRequest) -> None:
        if request in self._convicts:
            raise RequestError("a request like this one crashed the engine, again and again: it is refused")
        try:
            encoded = _encode(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        if not self._commands.put(Record(request.request_id, encoded)):
            raise EngineDeadError(self._commands.refusal or "")

    def abort(self, message: AbortRequests) -> None:
        self._commands.put(message, even_if_refused=True)

    def call(self, method: str, **args: Any) -> Future[Any]:
        message, future = self._calls.new(method, args)
        if not self._commands.put(message):
            self._calls.fail(EngineDeadError(self._commands.refusal or ""))
        return future

    def close(self, drain_s: float = 0.0) -> None:
        if os.getpid() != self._owner_pid:
            return  # a fork of the owner: the process is not its own to end
        self._commands.refuse("the engine was shut down")
        self._commands.put(Shutdown(drain_s=drain_s), even_if_refused=True)
        if self._thread is not threading.current_thread():
            self._thread.join(drain_s + 2 * STOP_GRACE_S)

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
            return EngineChild(context, self._spec.restarted(self.num_restarts))
        except OSError as error:
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from None

    def _is_over(self) -> bool:
        if self._close_by is None:
            return False
        return self._child is None or not self._is_up or time.monotonic() >= self._close_by

    def _wait(self) -> None:
        """Wait for something to happen, and act on it."""
        poller = zmq.Poller()
        poller.register(self._commands.fd, zmq.POLLIN)
        child = self._child
        if child is not None:
            poller.register(child.socket, zmq.POLLIN)
            if child.exit_fd >= 0:
                poller.register(child.exit_fd, zmq.POLLIN)
        events = dict(poller.poll(self._patience_ms()))
        if self._commands.fd in events:
            self._take_commands()
        if child is None:
            return
        has_exited = child.exit_fd in events or (child.exit_fd < 0 and child.has_exited())
        messages = child.receive_last() if has_exited else child.receive()
        for message in messages:
            self._take(message)
        if has_exited:
            self._bury(child)
        elif self._watchdog.look(is_due=self._core_owes_answers(), has_spoken=bool(messages)):
            self._failure = EngineFailure(
                error=f"it had not finished a step for {self._watchdog.limit_s:g} s (engine_step_timeout)"
            )
            child.kill()

    def _core_owes_answers(self) -> bool:
        return self._is_up and self._failure is None and (self._ledger.core_has_work or bool(self._sent_calls))

    def _patience_ms(self) -> int | None:
        now = time.monotonic()
        if self._close_by is not None:
            return max(0, int((self._close_by - now) * 1000)) + 1
        if self._child is None:
            return max(0, int((self._start_at - now) * 1000)) + 1
        patience = self._watchdog.patience_s()
        if self._child.exit_fd < 0:
            patience = min(1.0, patience or 1.0)
        return None if patience is None else int(patience * 1000) + 1

    def _take_commands(self) -> None:
        for command in self._commands.take():
            match command:
                case Record():
                    self._ledger.add(command)
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
            record = self._ledger.find(request_id)
            if record is not None:
                if record.core_id is not None:
                    core_ids.append(record.core_id)
                self._forget(record)
        for request_id, index in message.sequences:
            record = self._ledger.find(request_id)
            if record is not None and record.core_id is not None:
                sequences.append((record.core_id, index))
        if (core_ids or sequences) and self._child is not None:
            self._child.send(_encode(AbortRequests(core_ids, sequences)))
        self._give()

    def _give(self) -> None:
        """Hand the core what it may have and does not have."""
        if not self._is_up or self._child is None or self._close_by is not None:
            return
        for record in [record for record in self._ledger.held() if self._quarantine.may_run(record.request_id)]:
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
            self._ledger.given(record, core_id)
            self._child.send(encoded)
            self._quarantine.started(record.request_id)

    def _forget(self, record: Record) -> None:
        self._ledger.forget(record)
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
            record = self._ledger.of_core(delta.request_id)
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
                self._ledger.take_back(record)
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
        answered = self._calls.resolve(reply)
        if answered is not None and answered.method == "set_speculation" and reply.error is None:
            self._spec = self._spec.switched(answered.args["enabled"])  # another core starts as this one is

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
        self._ledger.take_back_all()
        if convicted is not None and (culprit := self._ledger.find(convicted)) is not None:
            self._refuse(culprit, death)
            self._budget.forgive()
        elif not was_explained:
            self._budget.spend(death)
        self.num_restarts += 1
        self._start_at = 0.0 if was_up else time.monotonic() + _RETRY_WAIT_S
        level = logging.WARNING if not was_explained else logging.INFO
        logger.log(level, "%s; starting it again, %d requests go on", death, len(self._ledger))

    def _refuse(self, record: Record, death: str) -> None:
        with contextlib.suppress(KeyError):  # its abort is on the way
            self._convicts.add(self._listener.resume_request(record.request_id))
        self._forget(record)
        text = f"this request crashes the engine, again and again and with no other beside it, and is refused ({death})"
        logger.error("request %s: %s", record.request_id, text)
        self._listener.on_outputs(refusal(record.request_id, text, "request").deltas)

    def _end(self, error: PlancastError) -> None:
        """Nothing comes any more: tell everyone who waits."""
        for command in self._commands.close(str(error)):
            if isinstance(command, Record):
                self._ledger.add(command)
        self._listener.on_outputs(failed(self._ledger.clear(), str(error)))
        self._calls.fail(EngineDeadError(str(error)))
        if not self._first_ready.done():
            self._first_ready.set_exception(error)
