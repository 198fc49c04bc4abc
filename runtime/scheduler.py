"""Iteration-level scheduling (Orca, OSDI 2022) over paged KV (PagedAttention, SOSP 2023), without a tensor library.

A step: running decodes first, then chunks of running prefills up to the token budget, then new requests. Requests that
do not find a block preempt those ranked behind them (priority, then arrival), by recompute or by swapping.

Why everything finishes: the best-ranked running request can take every block that others hold and fits the pool alone
(checked on arrival), so it runs to its end; and `WaitingQueue` lets nobody starve. Preemptions are bounded: after
`max_preemptions` of them a request comes back only when its worst case is reserved, and is nobody's victim any more.
"""

from __future__ import annotations

from array import array
from bisect import insort

from runtime.config import EngineConfig
from runtime.scheduling.kv_manager import KvManager
from runtime.scheduling.slo import StepTimeModel
from runtime.scheduling.step import ScheduledSequence, ScheduledStep
from runtime.scheduling.waiting_queue import WaitingQueue
from runtime.sequence import Request, Sequence
from runtime.swap import SwapMove, SwapSlots

# Prompt log probabilities need a row of logits a token: a smaller chunk bounds their memory.
PROMPT_LOGPROBS_CHUNK = 128


class Scheduler:
    """Decides each step. Owns the queue and the running list; blocks are the `KvManager`'s."""

    def __init__(self, config: EngineConfig, kv: KvManager, swap: SwapSlots | None = None):
        self.config = config
        self.kv = kv
        self.swap = swap
        self.waiting = WaitingQueue(config.starvation_turn)
        self.running: list[Request] = []  # by rank
        self.num_slots_used = 0  # sequences that the running requests have, or will have once forked
        self.step_time = StepTimeModel()
        self.preemptions = 0

    # --- requests come and go ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that passed its admission checks."""
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Drop a request, wherever it is, and free all that it holds, at once."""
        if not self.waiting.remove(request) and request in self.running:
            self._stop_running(request)
        for sequence in request.live:
            self.kv.release(sequence)
        request.live = []
        self._forget_swapped(request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """End one sequence and free its blocks; its siblings go on."""
        request = sequence.request
        self._forget_one_swapped(sequence)
        followers_wait = request.live[0] is sequence and any(s.num_computed < s.shared_tokens for s in request.live)
        request.live.remove(sequence)
        self.kv.release(sequence)
        if not request.live:
            self.remove(request)
        elif followers_wait and request in self.running:
            # They counted on its computing their common prefix: let them be placed anew.
            self._stop_running(request)
            self._give_up_blocks(request)
            self.waiting.push_preempted(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.num_slots_used -= request.width

    # --- a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Plan one step. An empty plan means that nothing can run now."""
        step = ScheduledStep()
        self.kv.reserved = sum(self.kv.outstanding(request) for request in self.running if request.protected)
        batch_open = self.config.batching == "in_flight" or not self.running
        if self.config.scheduling_policy == "priority":
            self._make_room_for_priority(step)
        starved = self._schedule_decodes(step)
        budget = self._prefill_budget(step)
        if len(step.sequences) < sum([len(request.live) for request in self.running]):
            budget = self._schedule_prefills(step, budget)
        # Right after a preemption blocks are scarce; and a block that a copy still reads must not be swapped into.
        if batch_open and (not starved or not step.sequences):
            self._admit(step, budget)
        if self.kv.moves:
            step.moves = self.kv.moves[:]
            self.kv.moves.clear()
        return step

    def can_start(self) -> bool:
        """Whether a waiting request may start in the next step; no certain promise that it will."""
        head = self.waiting.peek()
        if head is None:
            return False
        if self.config.scheduling_policy == "priority" and self.running and self.running[-1].priority > head.priority:
            return True
        if self.config.batching == "static" and self.running:
            return False
        return self.num_slots_used + head.width <= self.config.max_num_seqs

    def _schedule_decodes(self, step: ScheduledStep) -> bool:
        """One token (and its drafts) of every sequence that has no more to compute. True if somebody was preempted."""
        running, kv = self.running, self.kv
        size, refs, cached, pool = kv.block_size, kv.pool.ref_counts, kv.pool.cached, kv.pool
        scheduled = step.sequences
        spare = self.config.max_num_batched_tokens - sum([len(request.live) for request in running])
        starved = False
        index = 0
        while index < len(running):
            request = running[index]
            live = request.live
            if len(live) == 1:
                sequence = live[0]
                start = sequence.num_computed
                if len(sequence.tokens) - start != 1:
                    index += 1
                    continue
                if not sequence.draft_token_ids:
                    table = sequence.block_ids
                    at = start // size
                    if at < len(table) and refs[table[at]] == 1 and not cached[table[at]]:  # by far the most usual
                        scheduled.append(ScheduledSequence(sequence, 1, 1))
                        index += 1
                        continue
                ready = live
            else:
                ready = [sequence for sequence in live if len(sequence.tokens) - sequence.num_computed == 1]
                if not ready or (request.beam is not None and len(ready) < len(live)):  # beams go in step
                    index += 1
                    continue
            counts = self._with_drafts(ready, spare, len(running) - index)
            while (needed := kv.blocks_to_grow(ready, counts)) > self._available(request):
                victim = self._victim(index)
                self._preempt(victim, step)
                starved = True
                if victim is request:
                    break
            else:
                before = pool.num_free
                for sequence, count in zip(ready, counts, strict=True):
                    kv.grow(sequence, count, step.copies)
                    scheduled.append(ScheduledSequence(sequence, count, count))
                    spare -= count - 1
                    step.num_draft_tokens += count - 1
                if request.protected and needed:
                    kv.reserved -= min(kv.reserved, before - pool.num_free)
                index += 1
        step.num_decode_tokens = sum([part.num_tokens for part in scheduled])
        return starved

    def room_for_drafts(self) -> int:
        """Tokens that the running requests and their drafts may compute in the next step: all that a step holds, but
        for the prompt of a request that could start. A draft never holds up a prompt."""
        room = self.config.max_num_batched_tokens
        head = self.waiting.peek()
        if head is None or self.num_slots_used + head.width > self.config.max_num_seqs:
            return room
        return max(0, room - sum([len(sequence.tokens) for sequence in head.live]))

    def _with_drafts(self, ready: list[Sequence], spare: int, num_behind: int) -> list[int]:
        """Tokens that each sequence computes: its last one, and as many drafted ones as the step has room for.

        Drafts never make anybody give way: where they would leave less than a block for each request behind, they go.
        """
        counts = []
        for sequence in ready:
            drafts = min(len(sequence.draft_token_ids), spare)
            spare -= drafts
            counts.append(1 + drafts)
        if sum(counts) > len(counts):
            room = self.kv.pool.num_free - self.kv.reserved - num_behind
            if self.kv.blocks_to_grow(ready, counts) > room:
                counts = [1] * len(ready)
        return counts

    def _available(self, request: Request) -> int:
        """Blocks that the request may take now."""
        if request.protected:
            return self.kv.pool.num_free
        return self.kv.pool.num_free - self.kv.reserved

    def _prefill_budget(self, step: ScheduledStep) -> int:
        """Prefill tokens that fit beside the step's decodes."""
        budget = self.config.max_num_batched_tokens - step.num_decode_tokens
        if self.config.tpot_slo is not None and step.sequences:
            least = min(budget, self.kv.block_size)
            return self.step_time.prefill_budget(step.num_decode_tokens, self.config.tpot_slo, budget, least)
        return budget

    def _schedule_prefills(self, step: ScheduledStep, budget: int) -> int:
        """Chunks of the running requests' uncomputed tokens, best-ranked first. Returns what is left of the budget."""
        for request in self.running:
            if budget <= 0:
                break
            for sequence in request.live:
                if len(sequence.tokens) - sequence.num_computed > 1:  # else it is a decode
                    self._note_cached(request, self.kv.extend_match(sequence))
                    budget = self._schedule_chunk(sequence, step, budget)
        return budget

    def _schedule_chunk(self, sequence: Sequence, step: ScheduledStep, budget: int) -> int:
        """The sequence's next uncomputed tokens, into blocks that it got on admission. Returns what is left."""
        request = sequence.request
        missing = len(sequence.tokens) - sequence.num_computed
        if request.beam is not None and request.forked:
            missing -= 1  # beams go in step: the last token of all of them is a decode
        count = min(missing, budget, self.config.max_prefill_chunk or budget)
        if count <= 0 or sequence.num_computed < sequence.shared_tokens:
            return budget
        if request.wants_prompt_logprobs:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        last = sequence.num_computed + count == len(sequence.tokens)
        if request.wants_prompt_logprobs and sequence is request.live[0]:
            # Positions whose logits were not seen yet: the last ones of the chunk.
            seen = max(0, len(request.prompt_logprobs) - 1)
            end = sequence.num_computed + count
            rows = max(int(last), end - max(sequence.num_computed, seen))
        elif request.pooler is not None:
            rows = request.pooler.rows_of(sequence.num_computed, count, last=last)
        else:
            rows = int(last)
        step.sequences.append(ScheduledSequence(sequence, count, rows))
        step.num_prefill_tokens += count
        return budget - count

    def _note_cached(self, request: Request, num_tokens: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens += num_tokens

    # --- admission ---------------------------------------------------------------------------------------------

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Start waiting requests, in their order: the head is never overtaken by one that happens to fit."""
        static = self.config.batching == "static"
        while budget > 0 or static:
            request = self.waiting.peek()
            if request is None or self.num_slots_used + request.width > self.config.max_num_seqs:
                return
            swapped = request.swapped is not None
            if not self._acquire(request):
                return
            self.waiting.admit(request)
            insort(self.running, request, key=_rank)
            self.num_slots_used += request.width
            step.admitted.append(request)
            if not swapped:  # a restored one may hold shared blocks: its next decode looks after those
                for sequence in request.live:
                    budget = self._schedule_chunk(sequence, step, budget)

    def _acquire(self, request: Request) -> bool:
        """Find blocks for all tokens that the request has now, with room for the others to grow a block each."""
        headroom = self.num_slots_used
        request.protected = request.num_preemptions >= self.config.max_preemptions
        if request.swapped is not None:
            slots = self.kv.restore(request, headroom)
            if slots is None:
                return False
            assert self.swap is not None
            for slot in slots:
                self.swap.free(slot)
        elif not self.kv.acquire(request, headroom):
            return False
        else:
            self._note_cached(request, sum(sequence.num_computed for sequence in request.live))
        if request.protected:
            self.kv.reserved += self.kv.outstanding(request)
        return True

    # --- preemption --------------------------------------------------------------------------------------------

    def _victim(self, index: int) -> Request:
        """Who gives way to `running[index]`: the worst-ranked that is not protected, itself if need be.

        Only requests from `index` on: those before it are already in the step.
        """
        for request in reversed(self.running[index:]):
            if not request.protected:
                return request
        return self.running[-1]

    def _make_room_for_priority(self, step: ScheduledStep) -> None:
        """Preempt requests of lower priority for the head of the queue, if that makes it fit."""
        head = self.waiting.peek()
        if head is None or not self.running or self.running[-1].priority <= head.priority:
            return
        victims = [r for r in reversed(self.running) if r.priority > head.priority and not r.protected]
        size = self.kv.block_size
        needed = sum(-(-len(sequence.tokens) // size) for sequence in head.live)
        if head.num_preemptions >= self.config.max_preemptions:
            needed = max(needed, head.max_blocks(size))
        chosen: list[Request] = []
        slots, blocks = self.num_slots_used, self.kv.pool.num_free - self.kv.reserved
        for victim in victims:
            if slots + head.width <= self.config.max_num_seqs and blocks - needed >= slots:
                break
            chosen.append(victim)
            slots -= victim.width
            blocks += sum(
                self.kv.pool.ref_counts[block_id] == 1 for sequence in victim.live for block_id in sequence.block_ids
            )
        if slots + head.width <= self.config.max_num_seqs and blocks - needed >= slots:
            for victim in chosen:
                self._preempt(victim, step)

    def _preempt(self, request: Request, step: ScheduledStep) -> None:
        """Take a running request's blocks; it goes on later from its tokens, or from its swapped blocks."""
        self._stop_running(request)
        self.preemptions += 1
        request.num_preemptions += 1
        request.protected = False
        if self.swap is not None and self.config.preemption_mode == "swap":
            self._swap_out(request)
        self._give_up_blocks(request)
        step.preempted.append(request)
        self.waiting.push_preempted(request)

    def _give_up_blocks(self, request: Request) -> None:
        for sequence in request.live:
            self.kv.release(sequence)

    def _swap_out(self, request: Request) -> None:
        """Plan to save the computed blocks; where the swap space is full they are recomputed instead."""
        assert self.swap is not None
        size = self.kv.block_size
        if any(sequence.num_computed < sequence.shared_tokens for sequence in request.live):
            return
        tables = [sequence.block_ids[: -(-sequence.num_computed // size)] for sequence in request.live]
        distinct = sorted({block_id for table in tables for block_id in table})
        if self.kv.spill is not None and len(distinct) <= self.swap.num_free + len(self.kv.spill):
            self.kv.spill.make_room(len(distinct))
        slots = self.swap.allocate(len(distinct))
        if not slots:
            return
        slot_of = dict(zip(distinct, slots, strict=True))
        self.kv.moves += [SwapMove(True, block_id, slot) for block_id, slot in slot_of.items()]
        request.swapped = [
            (sequence.num_computed, array("i", [slot_of[block_id] for block_id in table]))
            for sequence, table in zip(request.live, tables, strict=True)
        ]

    def _forget_swapped(self, request: Request) -> None:
        if request.swapped is not None and self.swap is not None:
            for slot in {slot for _, slots in request.swapped for slot in slots}:
                self.swap.free(slot)
        request.swapped = None

    def _forget_one_swapped(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.swapped is None or self.swap is None:
            return
        _, slots = request.swapped.pop(request.live.index(sequence))
        kept = {slot for _, others in request.swapped for slot in others}
        for slot in set(slots) - kept:
            self.swap.free(slot)

    # --- figures -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of blocks, slots and lists."""
        self.kv.check(self.running)
        assert self.num_slots_used == sum(request.width for request in self.running), "slots do not add up"
        assert self.num_slots_used <= self.config.max_num_seqs, "more sequences run than max_num_seqs"
        assert [r.rank for r in self.running] == sorted(r.rank for r in self.running), "running is out of order"
        for request in self.waiting.requests():
            assert request not in self.running, f"{request} both waits and runs"
            assert not any(sequence.block_ids for sequence in request.live), f"{request} waits and holds blocks"
        if self.swap is not None:
            tables = [r.swapped for r in self.waiting.requests() if r.swapped is not None]
            held = {slot for table in tables for _, slots in table for slot in slots}
            kept = self.kv.spill.held_slots() if self.kv.spill is not None else set()
            assert not held & kept, f"slots {held & kept} hold a sequence's blocks and cached ones"
            self.swap.check(held | kept)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
