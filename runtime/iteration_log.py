"""The iteration log: one JSON line a step, for `plancast trace` and for whoever asks what the scheduler did.

Lines, told apart by `type`:

    header  the engine's sizes and settings; first
    step    began at `t` (seconds since the header), took `ms` [schedule, build, run, process]; `seqs` holds
            [request id, sequence, new tokens, past tokens, rows of logits] of every sequence in it
    end     a request is over: reason finish | abort | error
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from runtime.errors import PlancastError

if TYPE_CHECKING:
    from runtime.engine_core import EngineCore
    from runtime.scheduling.step import ScheduledStep
    from runtime.sequence import Request

VERSION = 1
_FLUSH_EVERY_S = 1.0


class LogHeader(msgspec.Struct, tag="header", kw_only=True):
    """First line. `started` is Unix time in seconds."""

    version: int = VERSION
    started: float
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    batching: str
    scheduling_policy: str


class AdmittedRequest(msgspec.Struct, array_like=True):
    """A request that a step started, or took up again after a preemption. `arrival` is on the log's clock."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    forks_into: int = 1  # sequences that start from its prompt's logits


class LogStep(msgspec.Struct, tag="step", kw_only=True):
    """One step. `free_blocks` counts idle cached ones, `idle_blocks` those alone."""

    step: int
    t: float
    ms: tuple[float, float, float, float]
    running: int
    waiting: int
    free_blocks: int
    idle_blocks: int
    decode_tokens: int
    prefill_tokens: int
    seqs: list[tuple[str, int, int, int, int]]
    admitted: list[AdmittedRequest] = []
    preempted: list[str] = []
    copies: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    draft_tokens: int = 0  # of the decode tokens; and how many of them were accepted
    accepted_tokens: int = 0


class StepTimes(NamedTuple):
    """The clock at a step's begin, and after each of its parts, in seconds."""

    began: float
    scheduled: float
    built: float
    ran: float
    ended: float


class LogEnd(msgspec.Struct, tag="end", kw_only=True):
    """A request is over."""

    t: float
    request_id: str
    reason: str


LogLine = LogHeader | LogStep | LogEnd


class IterationLog:
    """Writes one core's log. Raises `PlancastError` where the file cannot be made; a full disk ends only the log."""

    def __init__(self, path: str, core: EngineCore, clock: Callable[[], float]):
        self._core, self._clock = core, clock
        self._encoder = msgspec.json.Encoder()
        self._start = clock()
        self._accepted = 0  # drafted tokens, until the last step
        self._flush_due = self._start
        self._planned: list[tuple[str, int, int, int, int]] = []
        self._admitted: list[AdmittedRequest] = []
        try:
            self._file: IO[bytes] | None = open(path, "wb")  # noqa: SIM115 (it lives as long as the core)
        except OSError as error:
            raise PlancastError(f"cannot write the iteration log {path}: {error.strerror}") from error
        config = core.config
        self._write(
            LogHeader(
                started=time.time(),
                block_size=core.kv.block_size,
                num_blocks=core.kv.pool.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                batching=config.batching,
                scheduling_policy=config.scheduling_policy,
            )
        )

    def plan(self, step: ScheduledStep) -> None:
        """Note what a step is about to run (afterwards its sequences have moved on)."""
        self._planned = [
            (
                part.sequence.request.request_id,
                part.sequence.index,
                part.num_tokens,
                part.sequence.num_computed,
                part.num_rows,
            )
            for part in step.sequences
        ]
        self._admitted = [
            AdmittedRequest(
                request.request_id,
                round(request.arrival_time - self._start, 6),
                request.num_prompt_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
                1 if request.forked else request.width,
            )
            for request in step.admitted
        ]

    def step(self, step: ScheduledStep, number: int, times: StepTimes) -> None:
        """A planned step has run."""
        if self._file is None:
            return
        began, scheduled, built, ran, ended = times
        core, start = self._core, self._start
        self._write(
            LogStep(
                step=number,
                t=round(began - start, 6),
                ms=(_ms(began, scheduled), _ms(scheduled, built), _ms(built, ran), _ms(ran, ended)),
                running=len(core.scheduler.running),
                waiting=len(core.scheduler.waiting),
                free_blocks=core.kv.pool.num_free,
                idle_blocks=core.kv.pool.num_idle,
                decode_tokens=step.num_decode_tokens,
                prefill_tokens=step.num_prefill_tokens,
                seqs=self._planned,
                admitted=self._admitted,
                preempted=[request.request_id for request in step.preempted],
                copies=len(step.copies),
                swap_outs=sum(move.to_file for move in step.moves),
                swap_ins=sum(not move.to_file for move in step.moves),
                draft_tokens=step.num_draft_tokens,
                accepted_tokens=core.num_accepted_tokens - self._accepted,
            )
        )
        self._accepted = core.num_accepted_tokens
        if ended >= self._flush_due:
            self._flush_due = ended + _FLUSH_EVERY_S
            self._attempt(lambda file: file.flush())

    def ended(self, request: Request, reason: str) -> None:
        """A request is over."""
        self._write(LogEnd(t=round(self._clock() - self._start, 6), request_id=request.request_id, reason=reason))

    def _write(self, line: LogLine) -> None:
        self._attempt(lambda file: file.write(self._encoder.encode(line) + b"\n"))

    def _attempt(self, action: Callable[[IO[bytes]], object]) -> None:
        """Do something with the file. If that fails the log is over, and the engine goes on."""
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            logging.getLogger("plancast").warning("the iteration log ends here: %s", error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        """Write out what is buffered. Idempotent."""
        self._attempt(lambda file: file.close())
        self._file = None


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1e3, 4)


def read_log(path: str) -> tuple[LogHeader, list[LogStep], list[LogEnd]]:
    """A log's lines. A line cut off at the end (a killed engine) is left out.

    Raises:
        PlancastError: the file cannot be read, or is no iteration log of this version.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read().split(b"\n")
    except OSError as error:
        raise PlancastError(f"cannot read {path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(LogLine)
    lines: list[LogLine] = []
    for number, text in enumerate(raw, 1):
        if not text:
            continue
        try:
            lines.append(decoder.decode(text))
        except msgspec.MsgspecError as error:
            if number == len(raw) and lines:
                break
            raise PlancastError(f"{path}, line {number}, is no line of an iteration log: {error}") from error
    if not lines or not isinstance(lines[0], LogHeader):
        raise PlancastError(f"{path} is no iteration log: it has no header line")
    if lines[0].version != VERSION:
        raise PlancastError(f"{path} is an iteration log of version {lines[0].version}; this plancast reads {VERSION}")
    steps = [line for line in lines if isinstance(line, LogStep)]
    return lines[0], steps, [line for line in lines if isinstance(line, LogEnd)]
