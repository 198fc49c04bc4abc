"""From a recipe to a draft's artifact: corpus, student, training, build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.drafts.config import DraftTraining
from runtime.errors import PlancastError

if TYPE_CHECKING:
    from builder.drafts.train import Acceptance
    from builder.recipe import Recipe


class Watcher(Protocol):
    """Is told how far it is."""

    def corpus(self, tokens: int) -> None: ...

    def features(self, files: int) -> None: ...

    def step(self, step: int, loss: float, acceptance: Acceptance | None) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """What came of it."""

    artifact: Path  # of a head: the folder of its weights
    acceptance: Acceptance
    num_parameters: int


def train_draft(
    recipe: Recipe,
    artifact: Path,
    work: Path,
    out: Path,
    config: DraftTraining,
    watcher: Watcher,
    num_threads: int | None = None,
) -> TrainedDraft:
    """Train a draft for the engine in `artifact`, which was built from `recipe`, and build it into `out`.

    `work` holds the corpus and the checkpoints: a run that was stopped goes on from there.

    Raises `PlancastError`: the artifact is missing or of another model, there is no such `start_head`, it is of another
    shape, or the settings do not fit each other.
    """
    if not (artifact / "manifest.json").is_file():
        raise PlancastError(
            f"no artifact at {artifact}: the target writes the corpus, so build it first: plancast build"
        )
    from builder.drafts.corpus import read_corpus, write_corpus

    if config.start_head:
        from builder.drafts.make_head import check_start_head

        check_start_head(recipe, config)  # what is wrong is told before the corpus is written, not after
    write_corpus(artifact, work / "corpus", config, watcher.corpus, num_threads)

    _prepare_torch(config, num_threads)
    if config.kind == "head":
        from builder.drafts.make_head import train_head

        return train_head(recipe, artifact, work, out, config, watcher)

    import zoo
    from builder.build import build
    from builder.drafts.student import choose_tokens, make_student, save_student, to_student_ids
    from builder.drafts.train import train
    from builder.drafts.train_model import ModelTraining
    from runtime.artifact import Artifact

    target = zoo.resolve(recipe.model).folder
    manifest = Artifact.open(artifact).manifest
    vocab_size = manifest.model.vocab_size
    dialogues = list(read_corpus(work / "corpus"))
    texts = [ids for dialogue in dialogues for ids in (dialogue.token_ids, dialogue.top_ids[:, :2])]
    token_ids = choose_tokens(texts, manifest.model.eos_token_ids, config.vocab_size, vocab_size)
    student = make_student(target, config.num_layers, token_ids)
    training = ModelTraining(student, to_student_ids(token_ids, vocab_size), config)
    acceptance = train(training, dialogues, config, work, watcher.step)
    num_parameters = sum(parameter.numel() for parameter in student.parameters())
    folder = work / "model"
    save_student(student, target, token_ids, folder, _card(recipe, config, acceptance, num_parameters))
    return TrainedDraft(build(_draft_recipe(recipe, folder, out.name), out, force=True), acceptance, num_parameters)


def _prepare_torch(config: DraftTraining, num_threads: int | None) -> None:
    import torch

    from builder.process_memory import keep_freed_memory

    keep_freed_memory()
    torch.manual_seed(config.seed)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _draft_recipe(recipe: Recipe, folder: Path, name: str) -> Recipe:
    """The target's recipe for the draft: its limits, int8 weights, no comparison (with what?), no draft of its own."""
    from builder.recipe import recipe_from_dict, recipe_to_dict

    value = recipe_to_dict(recipe)
    value |= {"name": name, "model": str(folder.resolve()), "speculation": {}, "draft_head": None}
    value["weights"] |= {"dtype": "int8"}
    value["parity"] |= {"enabled": False}
    value["quality"] = {}
    return recipe_from_dict(value)


def _card(recipe: Recipe, config: DraftTraining, acceptance: Acceptance, num_parameters: int) -> str:
    shares = ", ".join(f"{share:.1%}" for share in acceptance.by_position)
    return "\n".join(
        [
            f"# A draft for {recipe.name}",
            "",
            f"{num_parameters:,} parameters: {config.num_layers} layers of {recipe.model} over its {config.vocab_size} "
            "most frequent tokens. `plancast draft train` trained it on what the model itself wrote, with no data set.",
            "",
            f"- corpus: {config.corpus_tokens:,} tokens, seed {config.seed}; {config.steps} steps of "
            f"{config.batch_tokens} tokens",
            f"- greedy drafts on held-out text, accepted by position: {shares}",
            f"- tokens that a verification of {config.draft_length} drafted tokens brings: {acceptance.length:.2f}",
            "",
            f'Use: `plancast serve TARGET --speculative-config \'{{"model": "DRAFT"}}\'`. To make it again: '
            f"`{config.command(recipe.name)}`.",
            "",
            "The weights remain under the licence of the model they were made from.",
            "",
        ]
    )
