"""The loop around an engine core, the same in its own process and in a thread: messages in, steps, messages out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

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
        self._peak_used_blocks = 0

    def run(self) -> None:
        """Returns when shut down. Whatever the executor raises in a step passes through."""
        while self._is_wanted() and not self._is_over():
            for message in self._channel.receive(0.0 if self._core.has_work() else self._idle_wait()):
                self._handle(message)
            if self._core.has_work() and not self._is_over():
                outputs = self._core.step()
                pool = self._core.kv.pool
                self._peak_used_blocks = max(self._peak_used_blocks, pool.num_blocks - pool.num_free)
                if outputs.deltas:
                    self._attach_stats(outputs)
                    self._channel.send(outputs)

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return not self._core.has_work() or time.monotonic() >= self._deadline

    def _idle_wait(self) -> float:
        return 0.0 if self._deadline is not None else IDLE_WAIT_S

    def _attach_stats(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
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
            case "reset_prefix_cache":
                return UtilityReply(call_id=call.call_id, result=self._core.reset_prefix_cache())
            case _:
                return UtilityReply(call_id=call.call_id, error=f"the engine knows no call {call.method!r}")


def refusal(request_id: str, error: str, kind: str) -> StepOutputs:
    """The answer to a request that is over before it began."""
    delta = RequestDelta(request_id=request_id, error=error, error_kind=kind, finished=True)
    return StepOutputs(deltas=[delta])
