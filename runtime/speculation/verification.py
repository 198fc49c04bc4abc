"""The target's logits against the drafts: which drafted tokens stay, and the one token more that a step always brings.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): with p the target's distribution at a position, after
processors and restrictions and given the tokens before it, and q what the drafted token x was drawn from, x is accepted
with probability min(1, p(x) / q(x)); a refused one is replaced by a token drawn from max(p - q, 0), normalized; where
all are accepted, one more comes from p. The output is distributed as p at every position.

Where q is a point mass (a look-up, an argmax) the rule reads: x is accepted with probability p(x), else replaced by a
token from p without x. That is a token y drawn from p, and x accepted if y = x. So such drafts are verified by the very
sampling that a plain step does, with the random number of the position: the text is the same, token for token, with a
draft and without one, whatever was drafted and whatever else is in the batch. Greedy requests are the special case.

A grammar's drafts are cut before the pass at the first token that it forbids. Then q is what remains of it over the
allowed tokens: the target's row, where forbidden tokens are minus infinity, says which those are.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.errors import GenerationError, RequestError
from runtime.executor import SampledRows
from runtime.logits_processors import NEG_INF
from runtime.philox import ACCEPT_STREAM, RESIDUAL_STREAM, uniform
from runtime.sampler import SampledToken, Sampler, SamplingState
from runtime.sampling.device_rows import token_of
from runtime.sampling.rows import search_cdf
from runtime.speculation.proposer import Distribution

if TYPE_CHECKING:
    from runtime.sequence import Sequence

Logits = NDArray[np.float32]


def sample_and_verify(
    sampler: Sampler,
    logits: Logits,
    sequences: Listed[Sequence],
    first_rows: Listed[int],
    sampled: SampledRows | None = None,
) -> list[list[SampledToken]]:
    """The new tokens of each sequence: accepted drafts, then one more, or as far as a token ends it.

    `logits` f32 [R, V]; a sequence's rows begin at its entry of `first_rows`, one for its last token and one for each
    of its `draft_token_ids`. `sampled`: what the device has sampled, and verified, already; `logits` has the other
    rows. All but an erroneous token are appended to the sampling states. Position by position, all sequences that have
    got there at once: each position's processors have seen the accepted tokens before it.
    """
    results: list[list[SampledToken]] = [[] for _ in sequences]
    going = list(range(len(sequences)))
    tokens = sampled.tokens.tolist() if sampled is not None else []
    depth = 0
    while going:
        left = going
        if sampled is not None:
            left = []
            for i in going:
                token = token_of(tokens, sampled.scores, first_rows[i] + depth, sequences[i].sampling)
                if token is None:
                    left.append(i)
                else:
                    results[i].append(token)
        plain = [i for i in left if not _is_drawn(sequences[i], depth)]
        if plain:
            rows = [logits[first_rows[i] + depth] for i in plain]
            drawn = sampler.sample(rows, [sequences[i].sampling for i in plain])
            for i, token in zip(plain, drawn, strict=True):
                results[i].append(token)
        for i in left:
            if _is_drawn(sequences[i], depth):
                results[i].append(_accept_or_replace(sampler, logits[first_rows[i] + depth], sequences[i], depth))
        still: list[int] = []
        for i in going:
            sequence, token = sequences[i], results[i][-1]
            if token.error is not None:
                continue
            sequence.sampling.append(token.token_id, token.logprob)
            draft = sequence.draft_token_ids
            ends = token.token_id in sequence.request.end_token_ids
            if depth < len(draft) and token.token_id == draft[depth] and not ends:
                still.append(i)
        going = still
        depth += 1
    return results


def _is_drawn(sequence: Sequence, depth: int) -> bool:
    """Whether the drafted token at `depth` was drawn at random, from a distribution that the verification needs."""
    return sequence.draft_distributions is not None and depth < len(sequence.draft_token_ids)


def _accept_or_replace(sampler: Sampler, raw: Logits, sequence: Sequence, depth: int) -> SampledToken:
    state, drafted = sequence.sampling, sequence.draft_token_ids[depth]
    try:
        ids, p = sampler.distribution(raw, state)
    except RequestError as error:
        return SampledToken(-1, error=str(error))
    except GenerationError as error:
        return SampledToken(-1, error=str(error), error_kind="generation")
    q = sequence.draft_distributions[depth]
    if state.grammar is not None:
        q = allowed_part(q, sampler.processed(raw, state))
    token = SampledToken(accept_or_replace(ids, p, q, drafted, state))
    if state.wants_logprob:
        sampler.add_logprobs(raw, state, token)
    return token


def accept_or_replace(
    ids: NDArray[np.int64], p: NDArray[np.float64], q: Distribution, drafted: int, state: SamplingState
) -> int:
    """The token at this position: `drafted`, which was drawn from `q`, or one in its place.

    `ids` i64 [K] ascending with probabilities `p` f64 [K]: the target's distribution. The random numbers are those of
    the state's seed, sequence and position.
    """
    q_ids, q_values = q
    p_drafted, q_drafted = _at(ids, p, drafted), _at(q_ids, q_values, drafted)
    u = uniform(state.seed, state.sequence_index, state.position, ACCEPT_STREAM)
    if u * q_drafted < p_drafted:
        return drafted
    residual = p.copy()
    where = np.searchsorted(ids, q_ids)
    shared = (where < ids.size) & (ids[np.minimum(where, ids.size - 1)] == q_ids)
    residual[where[shared]] = np.maximum(residual[where[shared]] - q_values[shared], 0.0)
    cumulative = np.cumsum(residual)
    if not cumulative[-1] > 0.0:  # p and q are equal but for rounding
        cumulative = np.cumsum(p)
    u = uniform(state.seed, state.sequence_index, state.position, RESIDUAL_STREAM)
    return int(ids[search_cdf(cumulative, u)])


def allowed_part(q: Distribution, row: Logits) -> Distribution:
    """`q` over the tokens that `row` f32 [V] does not forbid, normalized."""
    ids, values = q
    kept = row[ids] > NEG_INF
    total = values[kept].sum()
    return (ids[kept], values[kept] / total) if total > 0.0 else q


def _at(ids: NDArray[np.int64], values: NDArray[np.float64], token_id: int) -> float:
    """The probability of `token_id`; 0 where it is not among `ids`."""
    at = int(ids.searchsorted(token_id))
    return float(values[at]) if at < ids.size and ids[at] == token_id else 0.0
