"""The inputs of a traced graph, and where a step's batch holds them."""

from __future__ import annotations

import numpy as np

from runtime.executor import StepBatch

# Graph input -> the batch's field and dtype. A model without rotary embedding has no position_ids.
STEP_INPUTS = {
    "input_ids": ("token_ids", np.int64),
    "position_ids": ("positions", np.int64),
    "past_lens": ("past_lens", np.int32),
    "query_starts": ("query_starts", np.int32),
    "block_ids": ("block_ids", np.int32),
    "block_starts": ("block_starts", np.int32),
    "max_context_len": ("max_context_len", np.int32),
    "logits_rows": ("logits_rows", np.int64),
    "hidden_states": ("hidden_states", np.float32),
}
# The graph wants a scalar.
SCALAR = "max_context_len"


def one_token() -> StepBatch:
    """A step of the token 0 into block 0, which must hold nothing yet."""
    zero, starts = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    ids = zero.astype(np.int64)
    return StepBatch(ids, ids, zero, starts, zero, starts, 1, ids)
