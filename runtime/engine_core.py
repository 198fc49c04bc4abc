"""The engine core: requests in, one scheduled step after another, tokens out. Token ids only, one thread, no I/O but
the optional iteration log and swap file.

A step is `Scheduler.schedule` -> `build_batch` -> `Executor.run` -> `Sampler.sample` -> bookkeeping. A device samples
by itself what it can, and computes beside the host (`DeviceExecutor`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from runtime.admission import RequestGate
from runtime.batch import build_batch
from runtime.beam_steps import start_beams
from runtime.config import EngineConfig
from runtime.errors import PlancastError, RequestError
from runtime.executor import DeviceExecutor, Executor, SampledRows
from runtime.harvest import Harvester, note_finish, request_delta
from runtime.iteration_log import IterationLog, StepTimes
from runtime.memory import plan_kv_cache
from runtime.messages import EngineRequest, EngineStats, RequestDelta, SequenceDelta, StepOutputs
from runtime.sampler import Sampler
from runtime.sampling.device_rows import plan_sampling
from runtime.scheduler import Scheduler
from runtime.scheduling.kv_manager import KvManager
from runtime.scheduling.kv_report import KvReport, kv_report
from runtime.scheduling.run_ahead import Flight, all_go_on
from runtime.scheduling.slo import Goodput
from runtime.sequence import Request, Sequence
from runtime.speculation.proposer import Proposer
from runtime.speculation.speculator import Speculator, make_proposers
from runtime.swap import SwapFile, SwapMove, SwapSlots


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
        draft_engine: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.executor = executor
        self._device = executor if isinstance(executor, DeviceExecutor) else None
        self.config = config
        self.clock = clock
        layout = executor.kv_layout
        if not executor.num_blocks:
            executor.allocate(config.num_blocks or _blocks_that_fit(executor, config))
        self.sampler = sampler or Sampler(executor.vocab_size, config.eos_token_ids)
        self.kv = KvManager(executor.num_blocks, layout.block_size, config.enable_prefix_caching)
        self.swap_file: SwapFile | None = None
        slots = None
        if config.preemption_mode == "swap" or config.swap_cached_blocks:
            block_bytes = len(executor.read_block(0))
            slots = SwapSlots(max(1, config.swap_space // block_bytes))
            self.swap_file = SwapFile(slots.num_slots, block_bytes, config.swap_folder)
            if config.swap_cached_blocks:
                self.kv.spill_to(slots)
        self.scheduler = Scheduler(config, self.kv, slots)
        self.goodput = Goodput(config.ttft_slo, config.tpot_slo)
        self.requests: dict[str, Request] = {}
        self.last_step: StepTimes | None = None  # when the last step that ran anything did what
        self._gate = RequestGate(config, executor.vocab_size, executor.num_blocks, layout.block_size)
        self._deltas: list[RequestDelta] = []  # answers that need no step
        self._flight: Flight | None = None  # a step that was launched ahead
        self._num_structured = 0  # requests with a grammar
        self._stats = EngineStats(num_blocks=executor.num_blocks, block_size=layout.block_size)
        self.speculator: Speculator | None = None
        if config.speculation.is_on:
            proposers = make_proposers(config.speculation, draft_engine)
            self.speculator = Speculator(config.speculation, proposers, self._stats, clock)
        self._harvester = Harvester(self.scheduler, self.sampler, self._stats, clock, self._end, self.speculator)
        self._log = IterationLog(config.iteration_log, self, clock) if config.iteration_log else None

    # --- requests ----------------------------------------------------------------------------------------------

    def add_request(self, message: EngineRequest) -> None:
        """Queue a request. One that cannot run is answered by an error out of the next `step`, not by an exception."""
        try:
            self._add(message)
        except RequestError as error:
            self._refuse(message.request_id, str(error), "request")
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            # What no check foresaw must not end the engine: nothing has been queued yet.
            self._refuse(message.request_id, f"the request cannot be read: {type(error).__name__}: {error}", "request")

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
        return bool(self.requests or self._deltas or self._flight)

    # --- a step ------------------------------------------------------------------------------------------------

    @property
    def runs_beside(self) -> bool:
        """Whether `step` has time for other work while the device computes."""
        return self._device is not None

    def step(self, beside: Callable[[], None] | None = None) -> StepOutputs:
        """Run one iteration. Raises only what the executor raises: the core is lost then.

        `beside`: called while a device computes (`runs_beside`), once at most. It may add requests, nothing else.
        Between steps a device may compute already.
        """
        began = self.clock()
        if self.config.queue_timeout is not None:
            self._expire(began, self.config.queue_timeout)
        flight, self._flight = self._flight, None
        if flight is None:
            flight = self._plan(began)
            if flight is None:
                deltas, self._deltas = self._deltas, []
                return StepOutputs(deltas=deltas)
            if self._device is not None:
                self._device.launch(flight.batch, flight.sampling)
        else:
            flight.scheduled = flight.built = began  # beside the step before
        step = flight.step
        if self._log is not None:
            self._log.plan(step)
        if self._num_structured:  # their masks are made beside the pass
            self.sampler.prefetch([part.sequence.sampling for part in step.sequences if part.num_rows])
        if self._device is None:
            logits, sampled = self.executor.run(flight.batch), None
        else:
            logits, sampled = self._collect(self._device, flight, beside)
        ran = self.clock()
        hidden = getattr(self.executor, "hidden_states", None)
        self._deltas += self._harvester.harvest(step, logits, hidden, sampled)
        ended = self.clock()
        self.last_step = StepTimes(began, flight.scheduled, flight.built, ran, ended)
        if self.config.tpot_slo is not None:  # nobody else asks
            num_decodes = len(step.sequences) + step.num_draft_tokens
            self.scheduler.step_time.observe(num_decodes, step.num_prefill_tokens, ended - began)
        if self.speculator is not None:
            self.speculator.observe_step(step, ended - began)
        self._stats.steps += 1
        self._stats.step_seconds += ended - began
        if self._log is not None:
            self._log.step(step, self._stats.steps, self.last_step)
        deltas, self._deltas = self._deltas, []
        return StepOutputs(deltas=deltas)

    def _plan(self, began: float) -> Flight | None:
        """Draft, schedule, swap, and build the batch of the next step; None where there is nothing to run."""
        if self.speculator is not None:
            self.speculator.draft(self.scheduler.running, room=self.scheduler.room_for_drafts())
        step = self.scheduler.schedule()
        scheduled = self.clock()
        self._note_peak()
        for request in step.admitted:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = began
        if step.moves:
            self._swap(step.moves)
        if not step.sequences:
            return None
        batch = build_batch(step, self.kv.block_size)
        sampling = None
        if self._device is not None and (most := self._device.max_top_logprobs) is not None:
            sampling = plan_sampling(step.sequences, most, self._device.max_draft_entries)
        return Flight(step, batch, sampling, scheduled, self.clock())

    def _collect(
        self, device: DeviceExecutor, flight: Flight, beside: Callable[[], None] | None
    ) -> tuple[NDArray[np.float32], SampledRows | None]:
        """What the flight brings; and its successor is launched where that is sure to be right."""
        if beside is not None:
            beside()
        # What to draft follows from the tokens of this step.
        drafts = self.speculator is not None and self.speculator.may_draft(self.scheduler.running)
        ahead = flight.successor(self.scheduler) if not drafts else None
        logits, sampled = device.collect()
        if ahead is not None:
            assert sampled is not None
            if all_go_on(flight.step, sampled.tokens.tolist()):
                ahead.batch.token_ids = sampled.tokens.astype(np.int64)
                device.launch(ahead.batch, ahead.sampling)
                self._flight = ahead
                self._note_peak()
        return logits, sampled

    def _note_peak(self) -> None:
        self._stats.peak_used_blocks = max(self._stats.peak_used_blocks, self.kv.pool.num_used)

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

    def _swap(self, moves: list[SwapMove]) -> None:
        assert self.swap_file is not None
        for to_file, block_id, slot in moves:
            if to_file:
                self.swap_file.write(slot, self.executor.read_block(block_id))
                self._stats.swapped_out_blocks += 1
            else:
                self.executor.write_block(block_id, self.swap_file.read(slot))
                self._stats.swapped_in_blocks += 1

    def _end(self, request: Request, error: str | None = None, kind: str = "request") -> None:
        """A request ran to its end, or into an error of its own."""
        if error is None:
            self._forget(request, "finish")
            self._stats.requests_finished += 1
            self.goodput.count(request)
        else:
            self._forget(request, "error")
            self._refuse(request.request_id, error, kind)

    def _forget(self, request: Request, reason: str) -> None:
        request.finished = True
        del self.requests[request.request_id]
        if self.speculator is not None:
            self.speculator.release(request.sequences, complete=reason == "finish")
        self._num_structured -= request.params.structured_outputs is not None
        if self._log is not None:
            self._log.ended(request, reason)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block, the spilled ones too. Returns how many there were."""
        return self.kv.cache.reset() if self.kv.cache is not None else 0

    def set_speculation(self, enabled: bool) -> bool:
        """Switch drafting on or off from the next step on. Returns what it was.

        Raises `PlancastError` where the engine was loaded without a method to draft with.
        """
        if self.speculator is None:
            raise PlancastError(
                "this engine was loaded without speculation: load it with a method (--speculative-config), and switch "
                "that on and off"
            )
        was, self.speculator.enabled = self.speculator.enabled, enabled
        return was

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
        if kv.spill is not None:
            stats.num_spilled_blocks = len(kv.spill)
            stats.spilled_blocks, stats.restored_blocks = kv.spill.spilled, kv.spill.restored
        stats.preemptions = self.scheduler.preemptions
        stats.requests_in_slo, stats.tokens_in_slo = self.goodput.good, self.goodput.good_tokens
        stats.speculation_enabled = self.speculator is not None and self.speculator.enabled
        snapshot = copy.copy(stats)
        snapshot.spec_decode_num_accepted_tokens_per_pos = stats.spec_decode_num_accepted_tokens_per_pos.copy()
        if with_blocks:
            snapshot.block_states = pool.states()
        return snapshot

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were accepted so far."""
        return self._stats.spec_decode_num_accepted_tokens

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
