"""The engine core: requests in, one scheduled step after another, tokens out. Token ids only, one thread, no I/O but
the optional iteration log and swap file.

A step is `Scheduler.schedule` -> `build_batch` -> `Executor.run` -> `Sampler.sample` -> bookkeeping.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable

from runtime.admission import RequestGate
from runtime.batch import build_batch
from runtime.beam_steps import start_beams
from runtime.config import EngineConfig
from runtime.errors import RequestError
from runtime.executor import Executor
from runtime.harvest import Harvester, note_finish, request_delta
from runtime.iteration_log import IterationLog, StepTimes
from runtime.memory import plan_kv_cache
from runtime.messages import EngineRequest, EngineStats, RequestDelta, SequenceDelta, StepOutputs
from runtime.sampler import Sampler
from runtime.scheduler import ScheduledStep, Scheduler
from runtime.scheduling.kv_manager import KvManager
from runtime.scheduling.kv_report import KvReport, kv_report
from runtime.scheduling.slo import Goodput
from runtime.sequence import Request, Sequence
from runtime.swap import SwapFile, SwapSlots


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
        self.last_step: StepTimes | None = None  # when the last step that ran anything did what
        self._gate = RequestGate(config, executor.vocab_size, executor.num_blocks, layout.block_size)
        self._deltas: list[RequestDelta] = []  # answers that need no step
        self._num_structured = 0  # requests with a grammar
        self._stats = EngineStats(num_blocks=executor.num_blocks, block_size=layout.block_size)
        self._harvester = Harvester(self.scheduler, self.sampler, self._stats, clock, self._end)
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
        self._num_structured += params.structured_outputs is not None
        if message.user is not None:
            self._harvester.charge_users = True
        over = [delta for sequence in request.live[:] if (delta := self._finish_if_over(sequence)) is not None]
        if over:
            self._deltas.append(request_delta(request, over))
        if request.live:
            self.scheduler.add(request)
        else:
            self._end(request)

    def _finish_if_over(self, sequence: Sequence) -> SequenceDelta | None:
        """A resumed sequence whose last delivered token had ended it, when the news of that was lost."""
        if sequence.num_output_tokens == 0 or not note_finish(sequence, sequence.tokens[-1]):
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
            request = self.requests.get(request_id)
            if request is not None:
                self.scheduler.remove(request)
                self._forget(request, "abort")
                self._stats.requests_aborted += 1
        for request_id, index in sequences:
            request = self.requests.get(request_id)
            if request is None or not request.forked or request.beam is not None:
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
        self._stats.peak_used_blocks = max(self._stats.peak_used_blocks, self.kv.pool.num_used)
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
        if self._num_structured:  # their masks are made beside the pass
            self.sampler.prefetch([part.sequence.sampling for part in step.sequences if part.num_rows])
        logits = self.executor.run(batch)
        ran = self.clock()
        self._deltas += self._harvester.harvest(step, logits)
        ended = self.clock()
        self.last_step = StepTimes(began, scheduled, built, ran, ended)
        self.scheduler.step_time.observe(len(step.sequences), step.num_prefill_tokens, ended - began)
        self._stats.steps += 1
        if self._log is not None:
            self._log.step(step, self._stats.steps, self.last_step)
        deltas, self._deltas = self._deltas, []
        return StepOutputs(deltas=deltas)

    def _expire(self, now: float, timeout: float) -> None:
        for request in self.scheduler.waiting.expired(now, timeout):
            self.scheduler.remove(request)
            self._forget(request, "error")
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

    def _end(self, request: Request, error: str | None = None) -> None:
        """A request ran to its end, or into an error of its own."""
        if error is None:
            self._forget(request, "finish")
            self._stats.requests_finished += 1
            self.goodput.count(request)
        else:
            self._forget(request, "error")
            self._refuse(request.request_id, error, "request")

    def _forget(self, request: Request, reason: str) -> None:
        request.finished = True
        del self.requests[request.request_id]
        self._num_structured -= request.params.structured_outputs is not None
        if self._log is not None:
            self._log.ended(request, reason)

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
        snapshot = copy.copy(stats)
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
