"""A model that says what it is told: for tests of everything behind the model, where the text must be known.

In a ChatML chat it repeats the last user message, then ends. A bare prompt it repeats again and again.
Its tokens come from the blocks like `HashModelExecutor`'s, so that a block error still shows as a wrong token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_served import SlowHashModel
from tiny_tokenizer import tiny_tokenizer

FACTORY = "parrot:open_parrot"
CERTAIN = 30.0  # logit of the token that is said, over noise of about 1


class ParrotModel(SlowHashModel):
    def __init__(self, vocab_size: int, **options: Any):
        super().__init__(vocab_size, **options)
        tokenizer = tiny_tokenizer()
        start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
        assert start is not None
        assert end is not None
        self.start, self.end = start, end
        self.user = tokenizer.encode("user\n", add_special_tokens=False)
        self.assistant = tokenizer.encode("assistant\n", add_special_tokens=False)

    def logits_after(self, history: NDArray[np.int64] | list[int]) -> NDArray[np.float32]:
        logits = super().logits_after(history).astype(np.float32)
        logits = logits / max(1.0, float(np.abs(logits).max()))
        logits[self.next_token(np.asarray(history).tolist())] = CERTAIN
        return logits

    def next_token(self, history: list[int]) -> int:
        if self.start not in history:
            return history[self._repeated(history)]
        header = len(history) - 1 - history[::-1].index(self.start)
        said = history[header + 1 + len(self.assistant) :]
        told = self._told(history[:header])
        return told[len(said)] if len(said) < len(told) else self.end

    def _told(self, before: list[int]) -> list[int]:
        """The last user message's tokens."""
        opening = [self.start, *self.user]
        for at in range(len(before) - len(opening), -1, -1):
            if before[at : at + len(opening)] == opening:
                content = before[at + len(opening) :]
                return content[: content.index(self.end)] if self.end in content else content
        return []

    def _repeated(self, history: list[int]) -> int:
        """Where the token that goes on stands: the smallest period of the history gives it."""
        for period in range(1, len(history)):
            if all(history[i] == history[i - period] for i in range(period, len(history))):
                return len(history) - period
        return 0


def open_parrot(
    artifact: Any = None, *, num_threads: int | None = None, vocab_size: int = 512, step_s: float = 0.0, **options: Any
) -> ParrotModel:
    """For `executor_factory`."""
    size = vocab_size if artifact is None else artifact.manifest.model.vocab_size
    return ParrotModel(size, step_s=step_s, **options)


def open_slow(artifact: Any = None, *, num_threads: int | None = None) -> SlowHashModel:
    """The hash model at 20 ms a step, for whole processes, which take no arguments."""
    return SlowHashModel(artifact.manifest.model.vocab_size, step_s=0.02)
