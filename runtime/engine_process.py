"""The engine in a process of its own: `python -m runtime.engine_process`, started and owned by its client.

The client writes one `Launch` message to the new process's standard input; everything else goes over one ZeroMQ socket.
The client owns the shutdown: SIGINT and SIGTERM are ignored here, so that Ctrl-C or a service manager's signal to the
whole group lets the client drain. If the client dies, the process dies: the kernel sees to it on Linux, and the loop
looks for its parent between steps.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.config import EngineConfig
from runtime.engine_loop import EngineLoop, refusal
from runtime.errors import EngineDeadError, PlancastError
from runtime.messages import EngineFailure, FromEngine, Ready, Stopped, ToEngine

if TYPE_CHECKING:
    import zmq

    from runtime.engine_core import EngineCore
    from runtime.executor import Executor
    from runtime.structured import GrammarCompiler

DEFAULT_FACTORY = "runtime.executors:open_executor"
EXIT_FAILED = 70
_PR_SET_PDEATHSIG = 1
# Answers that were sent get this long to leave at exit.
_LINGER_MS = 2000


class EngineSpec(msgspec.Struct, kw_only=True, frozen=True):
    """All that it takes to open an engine, here or in another process.

    `factory` names a function, `module:function`, that returns an `Executor`. It is called with the opened artifact,
    where one is given, and `factory_args`.
    """

    config: EngineConfig
    artifact: str | None = None
    verify: str = "quick"  # quick | full
    factory: str = DEFAULT_FACTORY
    factory_args: dict[str, Any] = {}

    def restarted(self, number: int) -> EngineSpec:
        """What the process after `number` deaths opens: each writes an iteration log of its own, beside the first."""
        log = self.config.iteration_log
        if log is None or not number:
            return self
        stem, suffix = os.path.splitext(log)
        config = msgspec.structs.replace(self.config, iteration_log=f"{stem}.restart-{number}{suffix}")
        return msgspec.structs.replace(self, config=config)

    def switched(self, enabled: bool) -> EngineSpec:
        """The same with speculation switched on or off at the start."""
        speculation = msgspec.structs.replace(self.config.speculation, enabled=enabled)
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, speculation=speculation))


class Launch(msgspec.Struct, kw_only=True):
    """What the client tells its new process."""

    parent_pid: int
    address: str  # ZeroMQ, bound by the client
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """A core with all that it stands on."""

    core: EngineCore
    executors: list[Executor]  # the target's, and the draft's where there is one
    grammars: GrammarCompiler | None
    ready: Ready

    def close(self) -> None:
        """Free everything. Idempotent."""
        self.core.close()
        for executor in self.executors:
            executor.close()
        if self.grammars is not None:
            self.grammars.close()


def open_engine(spec: EngineSpec) -> OpenEngine:
    """Open the executor, size and allocate its KV cache, and put a core on it.

    Raises:
        PlancastError: whatever is wrong with the artifact, or with the memory.
    """
    from runtime.engine_core import EngineCore
    from runtime.memory import plan_kv_cache
    from runtime.sampler import Sampler
    from runtime.speculation.opening import open_draft

    started = time.monotonic()
    config, notes, grammars, artifact = spec.config, [], None, None
    factory = resolve_factory(spec.factory)
    if spec.artifact is None:
        executor = factory(**spec.factory_args)
    else:
        from runtime.artifact import Artifact
        from runtime.structured import GrammarCompiler

        artifact = Artifact.open(spec.artifact, verify="full" if spec.verify == "full" else "quick")
        notes = list(artifact.notes)
        executor = factory(artifact, **spec.factory_args)
        grammars = GrammarCompiler.from_folder(artifact.path, executor.vocab_size, config.eos_token_ids)
    executors = [executor]
    try:
        draft = None
        if artifact is not None:
            draft = open_draft(config.speculation, artifact, factory, spec.factory_args)
        if draft is not None:
            executors.append(draft.executor)
        plan = plan_kv_cache(
            executor.kv_layout,
            beside=draft.executor.kv_layout if draft is not None else None,
            max_num_seqs=config.max_num_seqs,
            max_context_len=config.max_context_len,
            num_blocks=config.num_blocks,
            kv_cache_memory=config.kv_cache_memory,
            share=config.kv_cache_memory_share,
        )
        if executor.num_blocks == 0:
            executor.allocate(plan.num_blocks)
        if (warm_up := getattr(executor, "warm_up", None)) is not None:
            warm_up()
        sampler = Sampler(executor.vocab_size, config.eos_token_ids, grammars=grammars)
        draft_engine = None
        if draft is not None:
            num_tokens = executor.num_blocks * executor.kv_layout.block_size
            caching = config.enable_prefix_caching
            draft_engine = draft.engine(config.speculation, sampler, num_tokens, caching=caching)
        core = EngineCore(executor, config, sampler=sampler, draft_engine=draft_engine)
    except BaseException:
        for opened in executors:
            opened.close()
        if grammars is not None:
            grammars.close()
        raise
    ready = Ready(
        pid=os.getpid(),
        num_blocks=executor.num_blocks,
        load_seconds=time.monotonic() - started,
        load_source=getattr(executor, "load_source", "memory"),
        kv_cache_bytes=sum(each.num_blocks * each.kv_layout.bytes_per_block for each in executors),
        kv_cache_reason=plan.reason,
        notes=[*notes, *(note for each in executors for note in getattr(each, "notes", ()))],
    )
    return OpenEngine(core, executors, grammars, ready)


def resolve_factory(name: str) -> Any:
    """The function that `module:function` names. Raises `PlancastError` where there is none."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlancastError(f"no executor factory {name!r} ({error}): name one as module:function") from None


def failure(error: Exception, doing: str) -> EngineFailure:
    """`error` as a message: our own errors word for word, others with what was being done."""
    if isinstance(error, PlancastError):
        return EngineFailure(error=str(error), error_class=type(error).__name__)
    text = f"the engine failed while {doing}: {type(error).__name__}: {error}"
    return EngineFailure(error=text, error_class=EngineDeadError.__name__, traceback=traceback.format_exc())


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    _die_with_parent()

    def is_wanted() -> bool:
        return os.getppid() == launch.parent_pid

    if not is_wanted():
        return 0
    import zmq

    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # a client that is slow must not hold the engine back
    socket.linger = _LINGER_MS
    socket.connect(launch.address)
    channel = _SocketChannel(socket)
    try:
        return _serve(launch.spec, channel, is_wanted)
    finally:
        socket.close()
        context.term()


def _serve(spec: EngineSpec, channel: _SocketChannel, is_wanted: Any) -> int:
    try:
        engine = open_engine(spec)
    except Exception as error:
        channel.send(failure(error, "loading"))
        return EXIT_FAILED
    # What was loaded stays: the collector need not walk over it in mid-step.
    gc.collect()
    gc.freeze()
    channel.send(engine.ready)
    try:
        EngineLoop(engine.core, channel, is_wanted).run()
        channel.send(Stopped())
    except Exception as error:
        channel.send(failure(error, "running a step"))
        return EXIT_FAILED
    finally:
        engine.close()
    return 0


class _SocketChannel:
    """A `Channel` over a ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout: float) -> list[ToEngine]:
        import zmq

        messages: list[ToEngine] = []
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return messages
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(data))
            except msgspec.ValidationError as error:
                self._refuse(data, error)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def _refuse(self, data: bytes, error: Exception) -> None:
        """A request with a field of the wrong type ends that request, not the engine."""
        raw = msgspec.msgpack.decode(data)
        if isinstance(raw, dict) and isinstance(raw.get("request_id"), str):
            self.send(refusal(raw["request_id"], f"the request cannot be read: {error}", "request"))


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that started us ends (Linux; elsewhere the loop looks for itself)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
