"""The loop around an engine core, the same in its own process and in a thread: messages in, steps, messages out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from runtime.errors import PlancastError
from runtime.messages import (
    AbortRequests,
    EngineRequest,
    EngineStats,
    FromEngine,
    RequestDelta,
    Shutdown,
    StepOutputs,
    ToEngine,
    Utility,
    UtilityReply,
)

if TYPE_CHECKING:
    from runtime.engine_core import EngineCore

# An idle core looks up this often whether anybody still wants it.
IDLE_WAIT_S = 1.0
# Step outputs carry a snapshot of the counters this often, so that they outlive the core.
STATS_INTERVAL_S = 0.5
# A core whose steps bring nothing to tell says so this often: silence means a step that does not end.
HEARTBEAT_S = 1.0


class Channel(Protocol):
    """One end of the two-way line between a core and its client."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there; where there is none, wait up to `timeout` seconds for one."""
        ...

    def send(self, message: FromEngine) -> None: ...


class EngineLoop:
    """Runs `core` until it is shut down, or `is_wanted` says that nobody listens any more."""

    def __init__(self, core: EngineCore, channel: Channel, is_wanted: Callable[[], bool] = lambda: True):
        self._core = core
        self._channel = channel
        self._is_wanted = is_wanted
        self._deadline: float | None = None  # monotonic; set once shutting down
        self._stats_due = 0.0
        self._heartbeat_due = 0.0
        self._peak_used_blocks = 0
        self._pending: StepOutputs | None = None  # of the last step, told beside the next one
        self._held: list[ToEngine] = []  # came beside a step, and must wait for its end

    def run(self) -> None:
        """Returns when shut down. Whatever the executor raises in a step passes through."""
        beside = self._beside if self._core.runs_beside else None
        try:
            self._run(beside)
        finally:
            self._send_pending()

    def _run(self, beside: Callable[[], None] | None) -> None:
        while self._is_wanted() and not self._is_over():
            for message in self._receive(0.0 if self._core.has_work() else self._idle_wait()):
                self._handle(message)
            if self._core.has_work() and not self._is_over():
                outputs = self._core.step(beside)
                pool = self._core.kv.pool
                self._peak_used_blocks = max(self._peak_used_blocks, pool.num_blocks - pool.num_free)
                self._send_pending()
                now = time.monotonic()
                if outputs.deltas or now >= self._heartbeat_due:
                    self._attach_stats(outputs, now)
                    self._pending = outputs
                    self._heartbeat_due = now + HEARTBEAT_S
                if beside is None or not self._core.has_work():
                    self._send_pending()

    def _receive(self, timeout: float) -> list[ToEngine]:
        """What was held back while the last step ran, then what is there now."""
        held, self._held = self._held, []
        return held + self._channel.receive(0.0 if held else timeout)

    def _beside(self) -> None:
        """While the device computes: tell what the last step brought, and take in new requests."""
        self._send_pending()
        for message in self._channel.receive(0.0):
            # Once one must wait for the end of the step, all after it do: an order is an order.
            if self._held or not isinstance(message, EngineRequest):
                self._held.append(message)
            else:
                self._handle(message)

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._channel.send(pending)

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return not self._core.has_work() or time.monotonic() >= self._deadline

    def _idle_wait(self) -> float:
        return 0.0 if self._deadline is not None else IDLE_WAIT_S

    def _attach_stats(self, outputs: StepOutputs, now: float) -> None:
        if outputs.stats is None and now >= self._stats_due:
            outputs.stats = self._stats()
            self._stats_due = now + STATS_INTERVAL_S

    def _handle(self, message: ToEngine) -> None:
        match message:
            case EngineRequest():
                if self._deadline is not None:
                    self._channel.send(refusal(message.request_id, "the engine is shutting down", "overloaded"))
                else:
                    self._core.add_request(message)
            case AbortRequests():
                self._core.abort(message.request_ids, message.sequences)
            case Utility():
                self._channel.send(self._call(message))
            case Shutdown():
                self._deadline = time.monotonic() + message.drain_s

    def _stats(self, **args: bool) -> EngineStats:
        stats = self._core.stats(**args)
        stats.peak_used_blocks = self._peak_used_blocks
        return stats

    def _call(self, call: Utility) -> UtilityReply:
        match call.method:
            case "ping":
                return UtilityReply(call_id=call.call_id, result="pong")
            case "stats":
                return UtilityReply(call_id=call.call_id, result=self._stats(**call.args))
            case "set_speculation":
                try:
                    return UtilityReply(call_id=call.call_id, result=self._core.set_speculation(**call.args))
                except PlancastError as error:
                    return UtilityReply(call_id=call.call_id, error=str(error))
            case "reset_prefix_cache":
                return UtilityReply(call_id=call.call_id, result=self._core.reset_prefix_cache())
            case _:
                return UtilityReply(call_id=call.call_id, error=f"the engine knows no call {call.method!r}")


def refusal(request_id: str, error: str, kind: str) -> StepOutputs:
    """The answer to a request that is over before it began."""
    delta = RequestDelta(request_id=request_id, error=error, error_kind=kind, finished=True)
    return StepOutputs(deltas=[delta])
