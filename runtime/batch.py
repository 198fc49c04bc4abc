"""From a scheduled step to the executor's flat inputs."""

from __future__ import annotations

from array import array

import numpy as np

from runtime.executor import StepBatch
from runtime.scheduling.step import ScheduledStep


def build_batch(step: ScheduledStep, block_size: int) -> StepBatch:
    """The step's inputs. Tables are cut to the blocks that past and new tokens need.

    The arrays are views of `array.array`s: building them copies each table once, at memcpy speed.
    """
    token_ids, positions, rows = array("q"), array("q"), array("q")
    past_lens, query_starts = array("i"), array("i", [0])
    block_ids, block_starts = array("i"), array("i", [0])
    total = longest = 0
    for part in step.sequences:
        sequence, count = part.sequence, part.num_tokens
        start = sequence.num_computed
        end = start + count
        if count == 1:  # never a draft: those follow a token of the sequence's own
            token_ids.append(sequence.tokens[start])
            positions.append(start)
            if part.num_rows:
                rows.append(total)
        else:
            drafts = end - len(sequence.tokens)
            token_ids.extend(sequence.tokens[start:end].tolist())
            if drafts > 0:
                token_ids.extend(sequence.draft_token_ids[:drafts])
            positions.extend(range(start, end))
            rows.extend(range(total + count - part.num_rows, total + count))
        total += count
        past_lens.append(start)
        query_starts.append(total)
        table = sequence.block_ids
        spare = len(table) - (end + block_size - 1) // block_size
        block_ids.extend(table[:-spare] if spare > 0 else table)
        block_starts.append(len(block_ids))
        if end > longest:
            longest = end
    return StepBatch(
        token_ids=np.frombuffer(token_ids, np.int64),
        positions=np.frombuffer(positions, np.int64),
        past_lens=np.frombuffer(past_lens, np.int32),
        query_starts=np.frombuffer(query_starts, np.int32),
        block_ids=np.frombuffer(block_ids, np.int32),
        block_starts=np.frombuffer(block_starts, np.int32),
        max_context_len=longest,
        logits_rows=np.frombuffer(rows, np.int64) if rows else np.empty(0, np.int64),
        copies=step.copies,
    )
