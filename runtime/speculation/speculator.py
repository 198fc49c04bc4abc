"""Speculation for one engine core: asks the proposers before each step, cuts what they draft, and learns from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.sequence import Request, Sequence
from runtime.speculation.config import SpeculationConfig
from runtime.speculation.costs import OUTLIER
from runtime.speculation.crowd import CROWD, CrowdDrafting
from runtime.speculation.length import Acceptance, DraftLengths
from runtime.speculation.ngram import NgramProposer
from runtime.speculation.proposer import ConfidentProposer, Draft, HiddenReader, Proposer
from runtime.speculation.suffix import SuffixProposer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.messages import EngineStats
    from runtime.scheduling.step import ScheduledStep

# A free draft gives way to a draft engine that was accepted so much more often.
_WORTH_DRAFTING = 0.8


@dataclass(slots=True)
class Drafting:
    """What speculation remembers of one sequence."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    source: str = ""  # of the draft under way
    level: int = 0
    confidences: list[float] | None = None


def make_proposers(config: SpeculationConfig, draft_engine: Proposer | None = None) -> list[Proposer]:
    """The proposers that `config` names, in its order. `draft_engine`: the one for draft_model, or eagle."""
    made: list[Proposer] = []
    for method in config.method:
        if method == "ngram":
            made.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
        elif method == "suffix":
            made.append(SuffixProposer(config.suffix_decoding_min_token_prob, config.suffix_decoding_max_cached_tokens))
        else:
            assert draft_engine is not None, f"{method} needs an engine"
            made.append(draft_engine)
    return made


class Speculator:
    """Drafts for the sequences of one core. `enabled` may change between steps."""

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: list[Proposer],
        stats: EngineStats,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.enabled = config.enabled
        self.proposers = proposers
        self.lengths = DraftLengths(config.num_speculative_tokens, adaptive=config.adaptive)
        self._stats = stats
        self._clock = clock
        self._crowd = CrowdDrafting()
        # Of the step under way: who was given drafts, whether they were looked for, and what that took; then, of each
        # sequence whose draft was verified, the part of its wait for a token that this saved.
        self._drafted: list[Sequence] = []
        self._looked = False
        self._drafting_seconds = self._waits_saved = 0.0
        # Asked once: an instance check against a protocol takes as long as much else of a step.
        self._confident = {proposer.name: proposer for proposer in proposers if isinstance(proposer, ConfidentProposer)}
        self._free = {proposer.name for proposer in proposers if proposer.is_free}
        paid = [[other for other in proposers[at:] if not other.is_free] for at in range(len(proposers) + 1)]
        self._chain = list(zip(proposers, paid[1:], strict=False))  # each with the ones after it that are not free
        # Of the proposers that read the target's hidden states.
        self._readers = [proposer for proposer in proposers if isinstance(proposer, HiddenReader)]

    # --- before a step -----------------------------------------------------------------------------------------

    def draft(self, running: Listed[Request], *, room: int) -> None:
        """Set `draft_token_ids` of the running requests' sequences. `room`: tokens of all of them in the step."""
        for sequence in self._drafted:  # those that were not run
            sequence.draft_token_ids, sequence.draft_distributions = [], None
        self._drafted = []
        self._looked, self._drafting_seconds, self._waits_saved = False, 0.0, 0.0
        self.lengths.begin_step()
        if not self._looks(running):
            return
        began = self._clock()
        ready: list[Sequence] = []
        num_sequences = num_tokens = 0
        for request in running:
            for sequence in request.live:
                missing = len(sequence.tokens) - sequence.num_computed
                num_sequences += 1
                num_tokens += missing
                if missing == 1 and self._may_draft(request, sequence):
                    ready.append(sequence)
        room -= num_tokens
        if self._is_crowd(running):  # no more than may be lost, and none beside a prompt: that is no step to learn from
            room = self.lengths.most_beside(num_tokens, room, 1.0 + self._crowd.balance)
            room *= num_tokens == num_sequences
        if ready and room > 0 and not self.lengths.rests(num_tokens) and self.lengths.pays(num_tokens, len(ready)):
            self._looked = True
            self._draft(ready, num_tokens, room)
        self._drafting_seconds = self._clock() - began
        self._stats.spec_decode_draft_seconds += self._drafting_seconds

    def _looks(self, running: Listed[Request], after: int = 0) -> bool:
        """Whether the next step, or the one `after` so many, is one to look for drafts in."""
        return self.enabled and (not self._is_crowd(running) or self._crowd.looks(after))

    def _is_crowd(self, running: Listed[Request]) -> bool:
        return self.lengths.adaptive and sum([len(request.live) for request in running]) >= CROWD

    def may_draft(self, running: Listed[Request]) -> bool:
        """Whether any of the running requests may be drafted for before the step after the one that runs."""
        return self._looks(running, after=1) and any(
            self._may_draft(request, sequence) for request in running for sequence in request.live
        )

    def _may_draft(self, request: Request, sequence: Sequence) -> bool:
        if request.beam is not None or request.params.speculation is False or not request.forked:
            return False
        return self._most(sequence) > 0

    def _most(self, sequence: Sequence) -> int:
        """Tokens to draft at most: the step brings one more, and the last one of all is never stored."""
        left = sequence.request.max_total_tokens - len(sequence.tokens) - 1
        return min(self.lengths.max_length, left)

    def _draft(self, ready: list[Sequence], num_tokens: int, room: int) -> None:
        """Each proposer in turn drafts for the sequences that those before it left; then the lengths are chosen. No
        more than `room` tokens in all."""
        drafts: dict[Sequence, Draft] = {}
        left = ready
        for proposer, later in self._chain:
            if not left:
                break
            if proposer.is_free:
                wanted = [(sequence, self._most(sequence)) for sequence in left]
            else:
                wanted = self._affordable(proposer, left, num_tokens, room)
            if not wanted:
                continue
            began = self._clock()
            proposed = self._ask(proposer, wanted, num_tokens)
            if not proposer.is_free:
                rounds = max((len(draft.token_ids) for draft in proposed if draft), default=0)
                self.lengths.observe_drafting(proposer.name, rounds, self._clock() - began, len(wanted))
                self._cut_to_worth(proposed, proposer.name, num_tokens, len(wanted))
            for (sequence, _), draft in zip(wanted, proposed, strict=True):
                if draft is not None and draft.token_ids and not self._better_left(sequence, draft, later):
                    self._cut_to_grammar(sequence, draft)
                    if draft.token_ids:
                        drafts[sequence] = draft
            left = [sequence for sequence in left if sequence not in drafts]
        free = [(sequence, draft) for sequence, draft in drafts.items() if self._is_free(draft)]
        paid = sum(len(draft.token_ids) for draft in drafts.values()) - sum(len(draft.token_ids) for _, draft in free)
        lengths = self.lengths.choose(
            [self._chance(sequence, draft.source, draft.level) for sequence, draft in free],
            [len(draft.token_ids) for _, draft in free],
            num_tokens + paid,
            room=room - paid,
        )
        for (_, draft), length in zip(free, lengths, strict=True):
            draft.cut(length)
        for sequence, draft in drafts.items():
            sequence.draft_token_ids, sequence.draft_distributions = draft.token_ids, draft.distributions
            memory = _memory(sequence)
            memory.source, memory.level, memory.confidences = draft.source, draft.level, draft.confidences
        self._drafted = [*drafts]
        self._cut_to_room(room)

    def _cut_to_room(self, room: int) -> None:
        for sequence in self._drafted:
            room -= len(sequence.draft_token_ids)
            if room < 0:
                del sequence.draft_token_ids[room:]
                if sequence.draft_distributions is not None:
                    del sequence.draft_distributions[room:]
                room = 0

    def _affordable(
        self, proposer: Proposer, left: list[Sequence], num_tokens: int, room: int
    ) -> list[tuple[Sequence, int]]:
        """How far to let a proposer draft that is not free: decided before it does, from earlier acceptance alone."""
        confident = self._confident.get(proposer.name)
        lengths = self.lengths.choose(
            [self._chance(sequence, proposer.name, 0) for sequence in left],
            [self._most(sequence) for sequence in left],
            num_tokens,
            proposer.name,
            room,
            [] if confident is None else [confident.num_behind(sequence) for sequence in left],
        )
        return [(sequence, length) for sequence, length in zip(left, lengths, strict=True) if length]

    def _ask(self, proposer: Proposer, wanted: list[tuple[Sequence, int]], num_tokens: int) -> list[Draft | None]:
        """What a proposer drafts. One that knows how sure it is goes on as long as that pays, whatever was planned."""
        confident = self._confident.get(proposer.name)
        if not self.lengths.adaptive or confident is None:
            return proposer.propose(wanted)

        def goes_on(confidences: Listed[float]) -> bool:
            return self.lengths.goes_on(confidences, self.lengths.max_length, num_tokens, len(wanted), proposer.name)

        return confident.propose_while([(sequence, self._most(sequence)) for sequence, _ in wanted], goes_on)

    def _cut_to_worth(self, proposed: list[Draft | None], source: str, num_tokens: int, num_sequences: int) -> None:
        """What a draft engine drafted is verified as far as its own confidence makes that pay."""
        for draft in proposed:
            if self.lengths.adaptive and draft is not None and draft.confidences:
                draft.cut(self.lengths.worth(draft.confidences, num_tokens, num_sequences, source))

    def _chance(self, sequence: Sequence, source: str, level: int) -> float:
        return self.lengths.chance(_memory(sequence).acceptance, source, level)

    def _better_left(self, sequence: Sequence, draft: Draft, later: list[Proposer]) -> bool:
        """Whether one of the proposers that follow was measured to be so much better that it should draft instead."""
        chance = self._chance(sequence, draft.source, draft.level)
        return any(chance < _WORTH_DRAFTING * self._chance(sequence, other.name, 0) for other in later)

    def _is_free(self, draft: Draft) -> bool:
        return draft.source in self._free

    @staticmethod
    def _cut_to_grammar(sequence: Sequence, draft: Draft) -> None:
        grammar = sequence.sampling.grammar
        if grammar is not None:
            draft.cut(grammar.count_allowed(draft.token_ids))

    # --- after a step ------------------------------------------------------------------------------------------

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """A sequence's draft went through the target."""
        memory, stats = _memory(sequence), self._stats
        self.lengths.observe_draft(memory.acceptance, memory.source, memory.level, num_accepted, num_drafted)
        if memory.confidences:
            self.lengths.observe_confidences(memory.source, memory.confidences[:num_drafted], num_accepted)
        self._waits_saved += 1.0 - 1.0 / (1 + num_accepted)
        stats.spec_decode_num_drafts += 1
        stats.spec_decode_num_draft_tokens += num_drafted
        stats.spec_decode_num_accepted_tokens += num_accepted
        per_position = stats.spec_decode_num_accepted_tokens_per_pos
        while len(per_position) < self.lengths.max_length:
            per_position.append(0)
        for position in range(num_accepted):
            per_position[position] += 1

    def take_hidden(
        self, hidden: NDArray[np.float32], sequences: Listed[Sequence], rows: Listed[int], counts: Listed[int]
    ) -> None:
        """See `HiddenReader`, but that `hidden` is the executor's own."""
        if self._readers and self.enabled:
            hidden = hidden.copy()
            for reader in self._readers:
                reader.take_hidden(hidden, sequences, rows, counts)

    def observe_step(self, step: ScheduledStep, seconds: float) -> None:
        """A step has run, drafting included, in `seconds`."""
        ran = seconds - self._drafting_seconds
        if not step.num_prefill_tokens and step.sequences:
            self.lengths.observe_step(step.num_decode_tokens, ran)
        if self._looked:
            self._crowd.settle(self._saved(step, ran), drafted=step.num_draft_tokens > 0)
        else:
            self._crowd.passed()
        self._looked, self._drafting_seconds = False, 0.0

    def _saved(self, step: ScheduledStep, seconds: float) -> float:
        """Of the time of a plain step, the part that one with drafts, which ran so long, was quicker by."""
        num_sequences = step.num_decode_tokens - step.num_draft_tokens
        if not num_sequences:  # those that were looked for had to give way
            return 0.0
        base, larger = (self.lengths.costs.predict(size) for size in (num_sequences, step.num_decode_tokens))
        if not base or not larger:
            return 0.0
        if not step.num_draft_tokens:
            seconds = base
        elif step.num_prefill_tokens:
            seconds = larger
        waits = 1.0 - self._waits_saved / num_sequences
        return 1.0 - (min(seconds, OUTLIER * larger) + self._drafting_seconds) * waits / base

    def release(self, sequences: Iterable[Sequence], *, complete: bool) -> None:
        """Sequences are over. `complete`: as they should be, not by an abort or an error."""
        for sequence in sequences:
            for proposer in self.proposers:
                proposer.release(sequence, complete=complete)


def _memory(sequence: Sequence) -> Drafting:
    if sequence.drafting is None:
        sequence.drafting = Drafting()
    return sequence.drafting
