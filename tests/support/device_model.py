"""The hash model as a device: steps in two halves, rows sampled where their logits are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_model import HashModelExecutor

from runtime.executor import RowSampling, RowScores, SampledRows, StepBatch
from runtime.executors.sampling_blocks import (
    MAX_TOP_LOGPROBS,
    given_block,
    kernel_variants,
    launches,
    pack_rows,
    read_rows,
    told_block,
    told_bytes,
)
from runtime.logprobs import RowLogprobs
from runtime.sampler import SampledToken, Sampler
from runtime.sampling.rows import ChunkedExp
from runtime.sampling_params import SamplingParams
from runtime.speculation.proposer import Distribution
from runtime.speculation.verification import accept_or_replace


class DeviceHashModel(HashModelExecutor):
    """Samples by the arithmetic of the runtime's sampler, but leaves every fifth token of a sequence to the host, as a
    device does with rows that have many candidates. Logits of rows that it sampled are NaN, so that a look at them
    shows.

    Attributes:
        sampled, asked: rows that it gave a token of, and that it was asked for one of.
        verified, hosted: drawn drafts that it was asked to verify, and rows that the host kept.
        ahead: whether a step was launched and not collected.
    """

    max_top_logprobs: int | None = 5
    max_draft_entries = 4000

    def __init__(self, vocab_size: int = 50, **options: Any) -> None:
        super().__init__(vocab_size, **options)
        self._flight: tuple[NDArray[np.float32], RowSampling | None] | None = None
        self.sampled = self.asked = self.verified = self.hosted = 0

    @property
    def ahead(self) -> bool:
        return self._flight is not None

    def launch(self, batch: StepBatch, sampling: RowSampling | None = None) -> None:
        assert self._flight is None, "a step was launched before the last one was collected"
        # At once: blocks of requests that are aborted while the step runs may be gone when it is collected.
        self._flight = self.run(batch), sampling

    def collect(self) -> tuple[NDArray[np.float32], SampledRows | None]:
        assert self._flight is not None, "there is nothing to collect"
        (logits, sampling), self._flight = self._flight, None
        if sampling is None:
            return logits, None
        assert len(sampling.temperatures) == len(logits) > 0
        tokens, scores = self.sample_rows(logits, sampling)
        self.asked += int((sampling.temperatures >= 0).sum())
        self.sampled += int((tokens >= 0).sum())
        self.verified += len(sampling.drafts.rows) if sampling.drafts is not None else 0
        self.hosted += int((sampling.temperatures < 0).sum())
        logits[tokens >= 0] = np.nan
        return logits, SampledRows(tokens, scores)

    def sample_rows(
        self, logits: NDArray[np.float32], sampling: RowSampling
    ) -> tuple[NDArray[np.int32], RowScores | None]:
        """The tokens i32 [R] as `SampledRows` has them, and the scores where any row wants them."""
        sampler = Sampler(self.vocab_size, ())
        tokens = np.full(len(logits), -1, np.int32)
        width = max(0, int(sampling.num_tops.max()))
        shape = len(logits), width
        scores = RowScores(
            np.zeros(len(logits)), np.zeros(len(logits), np.float32), np.zeros(len(logits), np.int32),
            np.zeros(shape, np.int32), np.zeros(shape, np.float32),
        )  # fmt: skip
        for r in np.flatnonzero(sampling.temperatures >= 0).tolist():
            if sampling.positions[r] % 5 == 4:
                tokens[r] = -2
                continue
            params = SamplingParams(
                temperature=float(sampling.temperatures[r]), top_k=int(sampling.top_ks[r]),
                top_p=float(sampling.top_ps[r]), min_p=float(sampling.min_ps[r]), seed=int(sampling.seeds[r]),
            )  # fmt: skip
            past = [0] * int(sampling.positions[r])
            state = sampler.new_state(params, [0], int(sampling.sequences[r]), past)
            if (q := _drawn_at(sampling, r)) is not None and np.isfinite(logits[r]).all():
                token = SampledToken(accept_or_replace(*sampler.distribution(logits[r], state), *q, state))
            else:
                (token,) = sampler.sample(logits[r : r + 1], [state])
            tokens[r] = token.token_id
            if (num_top := int(sampling.num_tops[r])) >= 0 and token.error is None:
                told = RowLogprobs(logits[r], ChunkedExp(self.vocab_size))
                entry = told.gather(token.token_id, num_top)
                scores.log_sums[r], scores.values[r] = told.log_sum, logits[r, token.token_id]
                scores.ranks[r] = entry.ranks[0]
                scores.top_ids[r, :num_top] = entry.token_ids[1:]
                scores.top_values[r, :num_top] = logits[r, entry.token_ids[1:]]
        return tokens, scores if width or (sampling.num_tops == 0).any() else None


def _drawn_at(sampling: RowSampling, row: int) -> tuple[Distribution, int] | None:
    """What the row's draft was drawn from, and the draft; None where it has none."""
    drafts = sampling.drafts
    if drafts is None or row not in drafts.rows:
        return None
    at = int(drafts.rows.searchsorted(row))
    part = slice(*drafts.starts[at : at + 2])
    return (drafts.ids[part].astype(np.int64), drafts.probs[part].astype(np.float64)), int(drafts.tokens[at])


class KernelDevice(DeviceHashModel):
    """Samples by the kernels, in Triton's interpreter."""

    def sample_rows(
        self, logits: NDArray[np.float32], sampling: RowSampling
    ) -> tuple[NDArray[np.int32], RowScores | None]:
        import torch

        from plugins.torch_engine.sampling import SamplingKernels

        rows, told = len(logits), told_block(len(logits))
        most = given_block(rows, rows, self.max_draft_entries).size, told.size
        variants = {name: replace(v, constants={**v.constants, "BLOCK": 512}) for name, v in kernel_variants().items()}
        kernels = SamplingKernels(torch.device("cpu"), variants, *most)
        given = pack_rows(sampling, kernels.given)
        kernels.launch(
            torch.from_numpy(logits), given.arrays, told.arrays, launches(sampling),
            {"size": logits.shape[1], "width": MAX_TOP_LOGPROBS}, (given.size, told_bytes(sampling)),
        )  # fmt: skip
        sampled = read_rows(sampling, kernels.told)
        return sampled.tokens, sampled.scores
