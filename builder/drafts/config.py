"""What a draft is trained with."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from runtime.errors import PlancastError


class DraftTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `PlancastError` on a value that cannot be."""

    seed: int = 0
    kind: Literal["head", "model"] = "model"
    # The corpus: tokens of prompts and answers that the target writes, one in so many sequences held out.
    corpus_tokens: int = 200_000
    max_question: int = 64  # tokens
    max_answer: int = 192
    batch_requests: int = 32  # side by side
    held_out_every: int = 15  # odd: every other dialogue is greedy
    top: int = 8  # of the target's probabilities at each position are learnt
    # The draft, over the target's most frequent tokens. Layers of a head (0: one); of a model (0: two): the target's
    # first ones, but for the last, which stays the last.
    num_layers: int = 0
    vocab_size: int = 8192
    # Training.
    steps: int = 600
    batch_tokens: int = 2048
    learning_rate: float = 6e-4
    warmup: int = 30
    evaluate_every: int = 50
    draft_length: int = 5  # positions that acceptance is measured at
    start_head: str = ""  # the head (a name or a folder) whose weights a head begins with; else regressions
    # A head: positions of a draft that the second half of the steps trains on (the first half: one), and what its
    # features' loss weighs beside its reading's.
    passes: int = 3
    feature_weight: float = 0.3

    def __post_init__(self) -> None:
        if not self.num_layers:
            msgspec.structs.force_setattr(self, "num_layers", 2 if self.kind == "model" else 1)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ("seed", "kind", "warmup", "feature_weight", "start_head") and not value > 0:
                raise PlancastError(f"draft training: {name} is {value}: give a number above 0")
        if self.start_head and self.kind != "head":
            raise PlancastError(
                "draft training: start_head is for --kind head: a model begins with its target's layers"
            )
        if self.vocab_size < 64:
            raise PlancastError(f"draft training: vocab_size is {self.vocab_size}: give 64 or more")

    def command(self, recipe: str) -> str:
        """The command line that trains with these settings for the recipe of this name."""
        options = {
            "kind": self.kind,
            "seed": self.seed,
            "tokens": self.corpus_tokens,
            "steps": self.steps,
            "layers": self.num_layers,
            "vocab-size": self.vocab_size,
            "max-answer": self.max_answer,
            "batch-requests": self.batch_requests,
            "learning-rate": f"{self.learning_rate:g}",
            "batch-tokens": self.batch_tokens,
            "evaluate-every": self.evaluate_every,
        }
        if self.kind == "head":
            options["passes"] = self.passes
        if self.start_head:
            options["start-head"] = self.start_head
        return f"plancast draft train {recipe} " + " ".join(f"--{name} {value}" for name, value in options.items())

    def key(self, names: tuple[str, ...]) -> str:
        """Tells whether what was made with other values may be gone on with."""
        chosen = {name: getattr(self, name) for name in names}
        return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()[:16]


CORPUS_FIELDS = ("seed", "kind", "batch_requests", "max_question", "max_answer", "top")
TRAINING_FIELDS = tuple(name for name in DraftTraining.__struct_fields__ if name not in ("steps", "batch_requests"))
