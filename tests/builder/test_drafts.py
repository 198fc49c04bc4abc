"""A draft from nothing but its target: corpus, training, artifact, speculation with it; going on after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from tiny_build import plancast_home, tiny_recipe, tiny_workshop

from builder.drafts.config import DraftTraining
from builder.drafts.corpus import read_corpus, read_shard, save_shard, write_corpus
from builder.drafts.writer import Dialogue
from runtime.errors import PlancastError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

CONFIG = DraftTraining(
    corpus_tokens=800,
    max_question=8,
    max_answer=24,
    batch_requests=8,
    held_out_every=4,
    num_layers=1,
    vocab_size=512,
    steps=20,
    batch_tokens=256,
    evaluate_every=4,
    warmup=3,
    learning_rate=3e-3,
)


class Watcher:
    def __init__(self, stop_at: int | None = None):
        self.tokens: list[int] = []
        self.steps: list[int] = []
        self.lengths: list[float] = []
        self.losses: list[float] = []
        self._stop_at = stop_at

    def corpus(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def features(self, files: int) -> None: ...

    def step(self, step: int, loss: float, acceptance: Any) -> None:
        self.steps.append(step)
        self.losses.append(loss)
        if acceptance is not None:
            self.lengths.append(acceptance.length)
        if step == self._stop_at:
            raise KeyboardInterrupt


def test_from_target_to_draft(tmp_path: Path) -> None:
    from builder.drafts.make import train_draft

    workshop = tiny_workshop()
    target, recipe = workshop / "artifact", tiny_recipe(workshop / "model")
    with plancast_home(workshop / "home"):
        stopped = Watcher(stop_at=7)
        with pytest.raises(KeyboardInterrupt):
            train_draft(recipe, target, tmp_path / "work", tmp_path / "draft", CONFIG, stopped, 1)
        watcher = Watcher()
        made = train_draft(recipe, target, tmp_path / "work", tmp_path / "draft", CONFIG, watcher, 1)
    assert stopped.tokens[-1] >= CONFIG.corpus_tokens
    assert watcher.tokens == [stopped.tokens[-1]], "the corpus is written once"
    assert watcher.steps == list(range(5, 21)), "training goes on from the last checkpoint"
    assert made.acceptance.length == pytest.approx(max(stopped.lengths[:2] + watcher.lengths))
    # A random target is hard to foresee: that it is learnt shows in the loss first.
    assert sum(watcher.losses[-3:]) < sum(stopped.losses[1:4])
    assert len(made.acceptance.by_position) == CONFIG.draft_length
    table = json.loads((made.artifact / "draft_vocabulary.json").read_text())
    assert len(table["target_ids"]) == 512
    assert CONFIG.command(recipe.name) in (made.artifact / "draft_card.md").read_text()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = []
    for config in (None, {"model": str(made.artifact), "adaptive": False}):
        with LLM(target, speculative_config=config, num_blocks=32) as llm:
            texts.append(llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].token_ids)
            drafted = llm.stats().spec_decode_num_draft_tokens
    assert texts[0] == texts[1]
    assert drafted > 0


def test_a_draft_has_no_head(tmp_path: Path) -> None:
    """The target's head, which its recipe names, fits the target alone."""
    from builder.drafts.make import _draft_recipe

    recipe = msgspec.structs.replace(tiny_recipe(tiny_workshop() / "model"), draft_head="smollm2-135m-instruct-eagle")
    assert _draft_recipe(recipe, tmp_path, "draft").draft_head is None


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_card_tells_a_command_that_makes_the_same(
    kind: Literal["head", "model"], monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer
    from typer.testing import CliRunner

    from builder.draft_cli import register

    config = DraftTraining(kind=kind, seed=3, steps=7, batch_tokens=512, learning_rate=1e-4)
    seen: list[DraftTraining] = []

    def note(*arguments: Any) -> None:
        seen.append(arguments[4])
        raise PlancastError("no training here")

    monkeypatch.setattr("builder.drafts.make.train_draft", note)
    app = typer.Typer()
    register(app)
    CliRunner().invoke(app, config.command("smollm2-135m-cpu").split()[1:])
    assert seen == [config]


def test_a_corpus_of_other_settings_is_not_mixed(tmp_path: Path) -> None:
    target = tiny_workshop() / "artifact"
    few = DraftTraining(corpus_tokens=100, max_question=4, max_answer=6, batch_requests=4)
    write_corpus(target, tmp_path, few, lambda _: None)
    dialogues = list(read_corpus(tmp_path))
    assert all(len(d.top_ids) == len(d.token_ids) - d.first for d in dialogues)
    assert all((d.top_p.astype(np.float32).sum(axis=1) <= 1.01).all() for d in dialogues)
    with pytest.raises(PlancastError, match="other settings"):
        write_corpus(target, tmp_path, DraftTraining(corpus_tokens=100, seed=1), lambda _: None)


def test_a_shard_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dialogues = [
        Dialogue(
            rng.integers(0, 99, length).astype(np.int32),
            first,
            rng.integers(0, 99, (length - first, 3)).astype(np.int32),
            rng.random((length - first, 3)).astype(np.float16),
        )
        for length, first in ((9, 4), (3, 2), (5, 5))
    ]
    save_shard(tmp_path / "a.npz", dialogues)
    for got, meant in zip(read_shard(tmp_path / "a.npz"), dialogues, strict=True):
        assert got.first == meant.first
        for name in ("token_ids", "top_ids", "top_p"):
            np.testing.assert_array_equal(getattr(got, name), getattr(meant, name))


def test_acceptance_by_position_is_what_a_simulation_finds() -> None:
    """One teacher-forced pass gives the same shares as drafting from every position would."""
    import torch

    from builder.drafts.train_model import ModelTraining

    rng = np.random.default_rng(1)
    text = rng.integers(0, 6, 40).astype(np.int32)
    guesses = np.where(rng.random(40) < 0.6, text, rng.integers(0, 6, 40))  # what the draft would say at each position

    class Fixed:
        """Says `guesses` whatever it reads."""

        config = SimpleNamespace(vocab_size=8)

        def model(self, input_ids: Any, attention_mask: Any) -> Any:
            said = torch.nn.functional.one_hot(torch.tensor(np.append(guesses[1:], 7)), 8).float()
            return SimpleNamespace(last_hidden_state=said[None])

        def lm_head(self, hidden: Any) -> Any:
            return hidden

    dialogue = Dialogue(text, 4, np.zeros((36, 1), np.int32), np.ones((36, 1), np.float16))
    got = ModelTraining(Fixed(), np.arange(8), DraftTraining(draft_length=3)).measure([dialogue])
    right = [0, 0, 0]
    reached = [0, 0, 0]
    for start in range(4, 40):
        for position in range(3):
            if start + position >= 40:
                break
            reached[position] += 1
            if guesses[start + position] != text[start + position]:
                break
            right[position] += 1
    for share, r, n in zip(got.by_position, right, reached, strict=True):
        assert share == pytest.approx(r / n)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(PlancastError, match="steps is 0"):
        DraftTraining(steps=0)
    with pytest.raises(PlancastError, match="64 or more"):
        DraftTraining(vocab_size=10)


def test_dialogues_are_of_many_kinds() -> None:
    """Three of four begin with an everyday question, one of eight with an opening, every fourth has a second answer
    that stands after the first, and the number of a dialogue decides what is in it, whatever is written beside it."""
    from builder.drafts.questions import everyday_questions
    from builder.drafts.writer import DialogueWriter

    workshop = tiny_workshop()
    config = msgspec.structs.replace(CONFIG, kind="head", batch_requests=4, max_question=8, max_answer=12)
    with DialogueWriter(workshop / "artifact", config, 1) as writer:
        batches = [batch for batch, _ in zip(writer.write(0), range(2), strict=False)]
        prompts = [writer._tokenizer.decode(d.token_ids[: d.first].tolist()) for batch in batches for d in batch]
        openings = tuple(writer._openings)
    with DialogueWriter(workshop / "artifact", config, 1) as writer:
        again = next(writer.write(4))
    assert [len(batch) for batch in batches] == [5, 5]
    first, second = batches[0][3:]
    assert second.token_ids[: first.first].tolist() == first.token_ids[: first.first].tolist()
    assert second.first > len(first.token_ids)
    questions = everyday_questions(config.seed)
    assert len(set(questions)) == len(questions) > 2000
    asked = [question for prompt in prompts for question in questions[:6] if question in prompt]
    assert asked == [*questions[:3], questions[2], *questions[3:6], questions[5]]
    assert any(opening in prompts[5] for opening in openings)
    assert [d.token_ids.tolist() for d in again] == [d.token_ids.tolist() for d in batches[1]]


def test_an_answer_that_goes_round_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of it stays, and the engine goes on with the next one."""
    from builder.drafts import writer as writing

    workshop = tiny_workshop()
    monkeypatch.setattr(writing, "goes_round", lambda ids: len(ids) > 100)
    config = msgspec.structs.replace(CONFIG, kind="model", batch_requests=4, max_question=8, max_answer=96)
    with writing.DialogueWriter(workshop / "artifact", config, 1) as writer:
        dialogues = [d for batch, _ in zip(writer.write(0), range(2), strict=False) for d in batch]
    lengths = [len(d.token_ids) - d.first for d in dialogues]
    assert len(dialogues) >= 8
    assert all(len(d.token_ids) < max(d.first, 100) + 17 for d in dialogues)
    assert sum(length % 16 == 0 for length in lengths) > 5
    assert all(len(d.top_ids) == length for d, length in zip(dialogues, lengths, strict=True))
