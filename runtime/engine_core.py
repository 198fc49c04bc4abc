"""The engine core: requests in, one scheduled step after another, tokens out. Token ids only, one thread, no I/O but
the optional iteration log and swap file.

A step is `Scheduler.schedule` -> `build_batch` -> `Executor.run` -> `Sampler.sample` -> bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.admission import RequestGate
from runtime.batch import build_batch
from runtime.beam_steps import advance_beams, beam_result, start_beams
from runtime.config import EngineConfig
from runtime.errors import RequestError
from runtime.executor import Executor
from runtime.iteration_log import IterationLog
from runtime.logprobs import prompt_logprobs
from runtime.memory import plan_kv_cache
from runtime.messages import EngineRequest, EngineStats, RequestDelta, SequenceDelta, StepOutputs
from runtime.sampler import Sampler
from runtime.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from runtime.scheduling.kv_manager import KvManager
from runtime.scheduling.kv_report import KvReport, kv_report
from runtime.scheduling.slo import Goodput
from runtime.scheduling.waiting_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from runtime.sequence import Request, Sequence
from runtime.swap import SwapFile, SwapSlots

if TYPE_CHECKING:
    from runtime.sampler import SampledToken


class EngineCore:
    """Runs requests on one executor. Not thread-safe: one owner calls it.

    An executor whose cache is not allocated yet gets one sized by `config`. Raises `PlancastError` where that fails.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.executor = executor
        self.config = config
        self.clock = clock
        layout = executor.kv_layout
        if not executor.num_blocks:
            executor.allocate(config.num_blocks or _blocks_that_fit(executor, config))
        self.sampler = sampler or Sampler(executor.vocab_size, config.eos_token_ids)
        self.kv = KvManager(executor.num_blocks, layout.block_size, config.enable_prefix_caching)
        self.swap_file: SwapFile | None = None
        slots = None
        if config.preemption_mode == "swap":
            block_bytes = len(executor.read_block(0))
            slots = SwapSlots(max(1, config.swap_space // block_bytes))
            self.swap_file = SwapFile(slots.num_slots, block_bytes, config.swap_folder)
        self.scheduler = Scheduler(config, self.kv, slots)
        self.goodput = Goodput(config.ttft_slo, config.tpot_slo)
        self.requests: dict[str, Request] = {}
        self._gate = RequestGate(config, executor.vocab_size, executor.num_blocks, layout.block_size)
        self._deltas: list[RequestDelta] = []  # answers that need no step
        self._stats = EngineStats(num_blocks=executor.num_blocks, block_size=layout.block_size)
        self._fair = False  # a request has named its user
        self._log = IterationLog(config.iteration_log, self, clock) if config.iteration_log else None

    # --- requests ----------------------------------------------------------------------------------------------

    def add_request(self, message: EngineRequest) -> None:
        """Queue a request. One that cannot run is answered by an error out of the next `step`, not by an exception."""
        try:
            self._add(message)
        except RequestError as error:
            self._refuse(message.request_id, str(error), "request")

    def _add(self, message: EngineRequest) -> None:
        if message.request_id in self.requests:
            raise RequestError(f"request id {message.request_id!r} is in use: ids must be unique", "request_id")
        request = self._gate.admit(message)
        waiting = self.scheduler.waiting
        if not request.resumed and waiting.num_fresh >= self.config.max_num_waiting:
            self._refuse(
                message.request_id,
                f"{waiting.num_fresh} requests are waiting, which is the limit (max_num_waiting): try again later",
                "overloaded",
            )
            return
        params, prompt = message.params, message.prompt_token_ids
        for sequence in request.live:
            sequence.sampling = self.sampler.new_state(params, prompt, sequence.index, sequence.output_token_ids)
        if params.beam_width:
            start_beams(request)
        self.requests[message.request_id] = request
        if message.user is not None:
            self._fair = True
        over = [delta for sequence in request.live[:] if (delta := self._finish_if_over(sequence)) is not None]
        if over:
            self._deltas.append(self._delta(request, over))
        if request.live:
            self.scheduler.add(request)
        else:
            self._end(request)

    def _finish_if_over(self, sequence: Sequence) -> SequenceDelta | None:
        """A resumed sequence whose last delivered token had ended it, when the news of that was lost."""
        if sequence.num_output_tokens == 0 or self._finish_reason(sequence, sequence.tokens[-1]) is None:
            return None
        sequence.request.live.remove(sequence)
        return SequenceDelta(sequence.index, [], None, sequence.finish_reason, sequence.stop_reason)

    def _refuse(self, request_id: str, error: str, kind: str) -> None:
        self._deltas.append(RequestDelta(request_id=request_id, finished=True, error=error, error_kind=kind))

    def abort(self, request_ids: Iterable[str], sequences: Iterable[tuple[str, int]] = ()) -> None:
        """Drop requests, and single sequences of requests, and free their blocks at once. Unknown ids are ignored.

        Nothing more is said of what was aborted; a request whose sequences are all over is over.
        """
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self.scheduler.remove(request)
                request.finished = True
                self._stats.requests_aborted += 1
                if self._log is not None:
                    self._log.ended(request, "abort")
        for request_id, index in sequences:
            request = self.requests.get(request_id)
            if request is None or request.beam is not None:
                continue
            for sequence in request.live:
                if sequence.index == index:
                    sequence.finish_reason = "stop"
                    self.scheduler.finish_sequence(sequence)
                    break
            if not request.live:
                self._end(request)

    def has_work(self) -> bool:
        """Whether `step` has anything to run or to tell."""
        return bool(self.requests or self._deltas)

    # --- a step ------------------------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Run one iteration. Raises only what the executor raises: the core is lost then."""
        began = self.clock()
        if self.config.queue_timeout is not None:
            self._expire(began, self.config.queue_timeout)
        step = self.scheduler.schedule()
        scheduled = self.clock()
        for request in step.admitted:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = began
        if self.swap_file is not None:
            self._swap(step)
        if not step.sequences:
            deltas, self._deltas = self._deltas, []
            return StepOutputs(deltas=deltas)
        if self._log is not None:
            self._log.plan(step)
        batch = build_batch(step, self.kv.block_size)
        built = self.clock()
        logits = self.executor.run(batch)
        ran = self.clock()
        self._process(step, logits)
        ended = self.clock()
        self.scheduler.step_time.observe(len(step.sequences), step.num_prefill_tokens, ended - began)
        self._stats.steps += 1
        if self._log is not None:
            self._log.step(step, self._stats.steps, (began, scheduled, built, ran, ended))
        deltas, self._deltas = self._deltas, []
        return StepOutputs(deltas=deltas)

    def _expire(self, now: float, timeout: float) -> None:
        for request in self.scheduler.waiting.expired(now, timeout):
            self.scheduler.remove(request)
            del self.requests[request.request_id]
            waited = now - request.arrival_time
            self._refuse(
                request.request_id,
                f"the request waited {waited:.1f} s for its turn, longer than the limit of {timeout:g} s "
                f"(queue_timeout): try again later",
                "queue_timeout",
            )

    def _swap(self, step: ScheduledStep) -> None:
        assert self.swap_file is not None
        for block_id, slot in step.swap_outs:
            self.swap_file.write(slot, self.executor.read_block(block_id))
        for slot, block_id in step.swap_ins:
            self.executor.write_block(block_id, self.swap_file.read(slot))
        self._stats.swapped_out_blocks += len(step.swap_outs)
        self._stats.swapped_in_blocks += len(step.swap_ins)

    def _process(self, step: ScheduledStep, logits: NDArray[np.float32]) -> None:
        """Take note of what was computed, sample, and tell."""
        advance = self.kv.advance
        targets: list[Sequence] = []
        rows: list[int] = []
        beams: dict[str, tuple[Request, list[int]]] = {}
        row = 0
        for part in step.sequences:
            sequence = part.sequence
            advance(sequence, part.num_tokens)
            if self._fair and part.num_tokens > 1:
                self.scheduler.waiting.charge(sequence.request.user, PROMPT_TOKEN_COST * part.num_tokens)
            if not part.num_rows:
                continue
            request = sequence.request
            if request.wants_prompt_logprobs:
                self._take_prompt_logprobs(part, logits[row : row + part.num_rows])
            row += part.num_rows
            if sequence.num_computed < len(sequence.tokens):
                continue
            if request.beam is not None:
                beams.setdefault(request.request_id, (request, []))[1].append(row - 1)
                continue
            targets.append(sequence)
            rows.append(row - 1)
            if not request.forked:
                for child in self._fork(request):
                    targets.append(child)
                    rows.append(row - 1)
        for request, beam_rows in beams.values():
            self._step_beams(request, logits[beam_rows])
        if targets:
            chosen = logits if rows == list(range(len(logits))) else logits[rows]
            self._take_tokens(targets, self.sampler.sample(chosen, [sequence.sampling for sequence in targets]))

    def _fork(self, request: Request) -> list[Sequence]:
        """The prompt is computed: start the other sequences on the same blocks."""
        first = request.live[0]
        request.forked = True
        for index in range(1, request.width):
            child = Sequence(request, index, first.tokens[:])
            child.sampling = self.sampler.new_state(request.params, request.message.prompt_token_ids, index)
            self.kv.fork(first, child)
            request.sequences.append(child)
            request.live.append(child)
        return request.live[1:]

    def _take_tokens(self, sequences: list[Sequence], sampled: list[SampledToken]) -> None:
        """Append each sequence's new token, end those that are over, and queue the deltas."""
        now = self.clock()
        deltas = self._deltas
        self._stats.generation_tokens += len(sequences)
        grouped: dict[str, list[SequenceDelta]] = {}
        for sequence, token in zip(sequences, sampled, strict=True):
            request = sequence.request
            if token.error is not None:
                self._fail(request, token.error)
                continue
            if request.finished:
                continue  # a sibling's sampling failed
            token_id = token.token_id
            sequence.tokens.append(token_id)
            state = sequence.sampling
            state.append(token_id, token.logprob)
            if request.first_token_time is None:
                self._first_token(request, now)
            request.last_token_time = now
            reason = self._finish_reason(sequence, token_id)
            delta = SequenceDelta(
                sequence.index,
                [token_id],
                None if token.logprobs is None else [token.logprobs],
                reason,
                sequence.stop_reason,
                None if token.logprob is None else state.cumulative_logprob,
            )
            if self._fair:
                self.scheduler.waiting.charge(request.user, OUTPUT_TOKEN_COST)
            if reason is not None:
                self.scheduler.finish_sequence(sequence)
            if request.width > 1:
                grouped.setdefault(request.request_id, []).append(delta)
            else:
                deltas.append(self._delta(request, [delta]))
                if reason is not None:
                    self._end(request)
        for request_id, parts in grouped.items():
            request = self.requests.get(request_id)
            if request is not None:
                deltas.append(self._delta(request, parts))
                if not request.live:
                    self._end(request)

    def _delta(self, request: Request, sequences: list[SequenceDelta]) -> RequestDelta:
        delta = RequestDelta(
            request_id=request.request_id,
            sequences=sequences,
            finished=not request.live,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
        )
        if request.wants_prompt_logprobs:
            delta.prompt_logprobs = request.prompt_logprobs
            request.wants_prompt_logprobs = False
        return delta

    def _finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        """Why the sequence is over after this token, or None; noted on the sequence too."""
        request = sequence.request
        if token_id in request.eos_token_ids:
            sequence.finish_reason = "stop"
        elif token_id in request.stop_token_ids:
            sequence.finish_reason, sequence.stop_reason = "stop", token_id
        elif len(sequence.tokens) >= request.max_total_tokens:
            sequence.finish_reason = "length"
        return sequence.finish_reason

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        if not request.resumed:
            self._stats.prompt_tokens += request.num_prompt_tokens

    def _take_prompt_logprobs(self, part: ScheduledSequence, logits: NDArray[np.float32]) -> None:
        """Score the prompt tokens that follow the chunk's rows."""
        sequence, request = part.sequence, part.sequence.request
        first = sequence.num_computed - part.num_rows  # position of the first row's own token
        known = len(request.prompt_logprobs)  # prompt tokens scored so far, the first one's None included
        following = sequence.tokens[max(known, first + 1) : min(request.num_prompt_tokens, sequence.num_computed + 1)]
        if following:
            skip = max(known, first + 1) - first - 1
            num_top = request.params.prompt_logprobs
            assert num_top is not None
            scored = prompt_logprobs(logits[skip : skip + len(following)], following.tolist(), num_top)
            request.prompt_logprobs.extend(scored)

    def _step_beams(self, request: Request, logits: NDArray[np.float32]) -> None:
        now = self.clock()
        if request.first_token_time is None:
            self._first_token(request, now)
        request.last_token_time = now
        self._stats.generation_tokens += advance_beams(request, logits, self.kv)
        if request.beam.is_done:
            results = beam_result(request)
            self.scheduler.remove(request)
            self._deltas.append(self._delta(request, results))
            self._end(request)

    # --- endings -----------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: str) -> None:
        """End one request with an error; the others go on."""
        if request.finished:
            return
        self.scheduler.remove(request)
        request.finished = True
        del self.requests[request.request_id]
        self._refuse(request.request_id, error, "engine")
        if self._log is not None:
            self._log.ended(request, "error")

    def _end(self, request: Request) -> None:
        request.finished = True
        del self.requests[request.request_id]
        self._stats.requests_finished += 1
        self.goodput.count(request)
        if self._log is not None:
            self._log.ended(request, "finish")

    def reset_prefix_cache(self) -> int:
        """Forget every cached block. Returns how many there were."""
        cache = self.kv.cache
        if cache is None:
            return 0
        count = len(cache)
        cache.reset()
        return count

    def close(self) -> None:
        """Close the iteration log and the swap file; the executor stays its owner's. Idempotent."""
        if self._log is not None:
            self._log.close()
        if self.swap_file is not None:
            self.swap_file.close()

    # --- figures -----------------------------------------------------------------------------------------------

    def stats(self, with_blocks: bool = False) -> EngineStats:
        """A snapshot of the counters; `with_blocks` adds one byte a block."""
        stats, pool, kv = self._stats, self.kv.pool, self.kv
        stats.num_running = len(self.scheduler.running)
        stats.num_waiting = len(self.scheduler.waiting)
        stats.num_free_blocks = pool.num_free
        stats.num_cached_blocks = len(kv.cache) if kv.cache is not None else 0
        stats.prefix_cache_queries, stats.prefix_cache_hits = kv.prefix_queries, kv.prefix_hits
        stats.preemptions = self.scheduler.preemptions
        stats.requests_in_slo, stats.tokens_in_slo = self.goodput.good, self.goodput.good_tokens
        snapshot = EngineStats(**{name: getattr(stats, name) for name in stats.__struct_fields__})
        if with_blocks:
            snapshot.block_states = pool.states()
        return snapshot

    def kv_report(self) -> KvReport:
        """How well the KV blocks in use are used: waste, and what sharing saves."""
        return kv_report(self.kv, self.scheduler.running)

    def check(self) -> None:
        """Assert the invariants of everything that holds blocks (for tests: it looks at every block)."""
        self.scheduler.check()
        live = set(self.scheduler.running) | set(self.scheduler.waiting.requests())
        assert live == set(self.requests.values()), "a request is lost, or lives on after its end"


def _blocks_that_fit(executor: Executor, config: EngineConfig) -> int:
    return plan_kv_cache(
        executor.kv_layout,
        max_num_seqs=config.max_num_seqs,
        max_context_len=config.max_context_len,
        kv_cache_memory=config.kv_cache_memory,
        share=config.kv_cache_memory_share,
    ).num_blocks
