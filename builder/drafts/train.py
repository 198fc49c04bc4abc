"""The training of drafts and heads: steps, checkpoints, and held-out acceptance that picks the best weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from builder.drafts.config import TRAINING_FIELDS, DraftTraining
from runtime.errors import PlancastError

Example = TypeVar("Example")
# Held-out examples that acceptance is measured on: more take longer than they tell.
_MOST_MEASURED = 160


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of held-out text. `by_position[i]`: the chance that the draft's i-th token is the target's where those before it
    were. `length`: tokens that a verification of a whole draft brings, the target's own one included."""

    by_position: tuple[float, ...]
    length: float

    @classmethod
    def of(cls, reached: NDArray[np.float64], right: NDArray[np.float64]) -> Acceptance:
        """From how many drafts reached each position, and how many were right there."""
        shares = tuple(float(r / max(n, 1)) for r, n in zip(right, reached, strict=True))
        return cls(shares, 1.0 + sum(math.prod(shares[: depth + 1]) for depth in range(len(shares))))


def count_hits(along: NDArray[np.bool_], reached: NDArray[np.float64], right: NDArray[np.float64]) -> None:
    """Add the drafts that begin at each place of a text to `reached` and `right` f64 [L].

    `along` bool [L, N]: whether the i-th token of a draft from place n is the text's; the last i places of row i have
    no such token.
    """
    so_far = np.ones(along.shape[1], bool)
    for position, hits in enumerate(along):
        so_far = so_far[: len(hits) - position]
        reached[position] += so_far.sum()
        so_far = so_far & hits[: len(so_far)]
        right[position] += so_far.sum()


class Trainee(Protocol[Example]):  # type: ignore[misc]
    """What is trained."""

    module: nn.Module

    def length(self, example: Example) -> int:
        """Tokens that an example adds to a step."""
        ...

    def loss(self, examples: Sequence[Example], done: float) -> torch.Tensor:
        """Of one step; `done`: the share of the training that is behind it, 0 to 1."""
        ...

    def measure(self, held_out: Sequence[Example]) -> Acceptance:
        """Acceptance of greedy drafts on text that was not trained on."""
        ...


def train(
    trainee: Trainee[Example],
    examples: Sequence[Example],
    config: DraftTraining,
    folder: Path,
    report: Callable[[int, float, Acceptance | None], None],
) -> Acceptance:
    """Train in place, to the weights that did best on held-out text. Goes on from a checkpoint in `folder`.

    `report(step, loss, acceptance or None)` after each step. Raises `PlancastError` where there is too little text.
    """
    module = trainee.module
    held_out = examples[:: config.held_out_every][:_MOST_MEASURED]
    trained = [example for i, example in enumerate(examples) if i % config.held_out_every]
    if not trained or not held_out:
        raise PlancastError(f"a corpus of {len(examples)} dialogues is too small to train on: raise --tokens")
    learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    path = folder / "checkpoint.pt"
    state: dict[str, Any] = {"step": 0, "best": None, "best_length": 0.0, "by_position": ()}
    if path.is_file():
        state = torch.load(path, weights_only=True)
        if state.get("key") != config.key(TRAINING_FIELDS):
            raise PlancastError(
                f"{folder} holds a checkpoint of other settings: give another --work folder, or remove {path.name}"
            )
        module.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])

    def evaluate(step: int) -> Acceptance:
        module.eval()
        measured = trainee.measure(held_out)
        module.train()
        learnt_now = {name: value for name, value in module.state_dict().items() if name in names}
        if measured.length > state["best_length"]:
            state["best"] = {name: value.clone() for name, value in learnt_now.items()}
            state["best_length"], state["by_position"] = measured.length, measured.by_position
        state.update(step=step, key=config.key(TRAINING_FIELDS), model=learnt_now, optimizer=optimizer.state_dict())
        beside = path.with_suffix(".writing")
        torch.save(state, beside)
        os.replace(beside, path)
        return measured

    epochs = _Epochs(trainee, trained, config)
    module.train()
    if not state["step"]:
        report(0, math.nan, evaluate(0))
    for step in range(state["step"] + 1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, config)
        loss = trainee.loss(epochs.at(step), (step - 1) / config.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        due = step % config.evaluate_every == 0 or step == config.steps
        report(step, loss.item(), evaluate(step) if due else None)
    if state["best"] is not None:
        module.load_state_dict(state["best"], strict=False)
    return Acceptance(tuple(state["by_position"]), state["best_length"])


def _schedule(step: int, config: DraftTraining) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if step <= config.warmup:
        return step / max(1, config.warmup)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class _Epochs(Generic[Example]):
    """The examples of each step: all of them in an epoch, at random but the same in every run, so that a resumed one
    goes on as if it had not stopped. Those of like length run together: less padding."""

    def __init__(self, trainee: Trainee[Example], examples: Sequence[Example], config: DraftTraining):
        self._examples, self._config = examples, config
        self._lengths = np.array([trainee.length(example) for example in examples])
        self._epoch, self._first, self._batches = 0, 1, self._plan(0)  # `_first`: the epoch's first step

    def at(self, step: int) -> list[Example]:
        """The examples of a step, counted from 1; steps are asked for in order."""
        while step >= self._first + len(self._batches):
            self._first += len(self._batches)
            self._epoch += 1
            self._batches = self._plan(self._epoch)
        return [self._examples[index] for index in self._batches[step - self._first]]

    def _plan(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng((self._config.seed, epoch))
        batches: list[list[int]] = [[]]
        tokens = 0
        for index in np.argsort(self._lengths * rng.uniform(0.8, 1.25, len(self._lengths))).tolist():
            if tokens >= self._config.batch_tokens:
                batches.append([])
                tokens = 0
            batches[-1].append(index)
            tokens += int(self._lengths[index])
        rng.shuffle(batches)
        return batches
