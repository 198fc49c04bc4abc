"""Rows that the device samples: which of a step's rows those may be, and what came back of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from runtime.executor import DrawnDrafts, RowSampling, RowScores
from runtime.messages import TokenLogprobs
from runtime.sampler import SampledToken, SamplingState
from runtime.scheduling.step import ScheduledSequence

if TYPE_CHECKING:
    from runtime.speculation.proposer import Distribution

# temperature, top_k, top_p, min_p, seed, sequence, position, num_top
_Row = tuple[float, int, float, float, int, int, int, int]
_ON_THE_HOST: _Row = (-1.0, 0, 1.0, 0.0, 0, 0, 0, -1)


class _Drawn:
    """The drafts of a step that were drawn at random, as far as the device takes them."""

    def __init__(self, max_entries: int):
        self._left = max_entries
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._distributions: list[Distribution] = []

    def takes(self, part: ScheduledSequence, row: int) -> bool:
        """Add the drafts of a sequence whose rows begin at `row`; False, and nothing is added, where there is no room.

        A greedy sequence's are none: the likeliest token, which the device finds as without a draft, takes the place of
        whatever was drafted.
        """
        sequence, count = part.sequence, part.num_rows - 1
        if sequence.draft_distributions is None or sequence.sampling.greedy:
            return True
        distributions = sequence.draft_distributions[:count]
        entries = sum([len(ids) for ids, _ in distributions])
        if entries > self._left:
            return False
        self._left -= entries
        self._rows += range(row, row + count)
        self._tokens += sequence.draft_token_ids[:count]
        self._distributions += distributions
        return True

    def drafts(self) -> DrawnDrafts | None:
        if not self._rows:
            return None
        ids, probs = zip(*self._distributions, strict=True)
        return DrawnDrafts(
            np.array(self._rows, np.int32),
            np.array(self._tokens, np.int32),
            np.cumsum([0, *map(len, ids)], dtype=np.int32),
            np.concatenate(ids, dtype=np.int32, casting="same_kind"),
            np.concatenate(probs, dtype=np.float32, casting="same_kind"),
        )


def plan_sampling(
    parts: Iterable[ScheduledSequence], max_top_logprobs: int, max_draft_entries: int = 0
) -> RowSampling | None:
    """How to sample the rows of a step, in the order of its batch. None where the host must have them all.

    The host keeps rows that are not sampled plainly: of prompts whose log probabilities are wanted, of beams, of a
    prompt that several sequences go on from, behind processors, grammars and typical_p; where more log probabilities
    are wanted than the device gives, and where drafts were drawn from more tokens than it has room for.
    """
    rows: list[_Row] = []
    drawn = _Drawn(max_draft_entries)
    sampled = 0
    for part in parts:
        count = part.num_rows
        if not count:
            continue
        sequence = part.sequence
        state = sequence.sampling
        if not (_is_plain(part, max_top_logprobs) and drawn.takes(part, len(rows))):
            rows += [_ON_THE_HOST] * count
            continue
        sampled += count
        settings = state.restriction
        temperature = 0.0 if state.greedy else settings.temperature
        num_top = -1 if not state.wants_logprob else state.num_top or 0
        position = state.position
        for depth in range(count):  # a draft's rows follow that of the last token
            rows.append(
                (temperature, settings.top_k, settings.top_p, settings.min_p, state.seed, state.sequence_index,
                 position + depth, num_top)
            )  # fmt: skip
    if not sampled:
        return None
    temperatures, top_ks, top_ps, min_ps, seeds, sequences, positions, num_tops = zip(*rows, strict=True)
    return RowSampling(
        temperatures=np.array(temperatures, np.float32),
        top_ks=np.array(top_ks, np.int32),
        top_ps=np.array(top_ps, np.float32),
        min_ps=np.array(min_ps, np.float32),
        seeds=np.array(seeds, np.uint64),
        sequences=np.array(sequences, np.int32),
        positions=np.array(positions, np.int32),
        num_tops=np.array(num_tops, np.int32),
        drafts=drawn.drafts(),
    )


def _is_plain(part: ScheduledSequence, max_top_logprobs: int) -> bool:
    sequence = part.sequence
    request, state = sequence.request, sequence.sampling
    if request.pooler is not None or request.beam is not None or request.wants_prompt_logprobs or not request.forked:
        return False
    return state.is_plain and 0 <= (state.num_top or 0) <= max_top_logprobs


def token_of(tokens: list[int], scores: RowScores | None, row: int, state: SamplingState) -> SampledToken | None:
    """The token that a device sampled for `state` from the row, out of all rows' `tokens`; None where it has none."""
    if (token_id := tokens[row]) < 0:
        return None
    token = SampledToken(token_id)
    if state.wants_logprob:
        assert scores is not None
        log_sum = float(scores.log_sums[row])
        token.logprob = float(scores.values[row]) - log_sum
        if (num_top := state.num_top) is not None:
            top = scores.top_values[row, :num_top].astype(np.float64) - log_sum
            token.logprobs = TokenLogprobs(
                token_ids=[token_id, *scores.top_ids[row, :num_top].tolist()],
                logprobs=[token.logprob, *top.tolist()],
                ranks=[int(scores.ranks[row]), *range(1, num_top + 1)],
            )
    return token
