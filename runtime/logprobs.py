"""Log probabilities: the log-softmax of the engine's own logits, before masks, penalties and temperature (as vLLM)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.errors import GenerationError
from runtime.messages import TokenLogprobs
from runtime.sampling.rows import ChunkedExp, top_ids


def not_finite(row_max: float) -> str:
    """What there is to say of a row of logits whose maximum, or one of whose logits, is no finite number."""
    return f"the engine's logits are not finite (their maximum is {row_max}), so nothing can be sampled from them"


class RowLogprobs:
    """One row of logits, ready to be asked for log probabilities. Keep it no longer than the row."""

    def __init__(self, row: NDArray[np.float32], exp: ChunkedExp):
        self.row = row
        self._exp = exp
        self.log_sum = exp.log_sum(row)

    def logprob(self, token_id: int) -> float:
        """Natural log probability of the token."""
        return float(self.row[token_id]) - self.log_sum

    def gather(self, token_id: int, num_top: int) -> TokenLogprobs:
        """The token's entry, then those of the `num_top` likeliest tokens (-1: all), likeliest first.

        A rank is 1 + the number of likelier tokens.
        """
        ids = top_ids(self.row, self.row.size if num_top < 0 else num_top, self._exp)
        values, value = self.row[ids], self.row[token_id]
        higher = values if values.size and value >= values[-1] else self.row  # whoever is likelier is in `higher`
        return TokenLogprobs(
            token_ids=[token_id, *ids.tolist()],
            logprobs=[float(value) - self.log_sum, *(values.astype(np.float64) - self.log_sum).tolist()],
            ranks=[1 + int(np.count_nonzero(higher > value)), *range(1, ids.size + 1)],
        )


def prompt_logprobs(logits: NDArray[np.float32], token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of a chunk of a prompt.

    `logits` f32 [R, V]; `token_ids` [R]: the token that follows row i. `num_top` as `SamplingParams.prompt_logprobs`.
    Raises `GenerationError` where a row is not finite.
    """
    exp = ChunkedExp(logits.shape[1])
    entries = []
    for row, token in zip(logits, token_ids, strict=True):
        logprobs = RowLogprobs(row, exp)
        if math.isnan(logprobs.log_sum):
            raise GenerationError(not_finite(float(row.max())))
        entries.append(logprobs.gather(token, num_top))
    return entries
