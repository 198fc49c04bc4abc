"""From a corpus to a trained head's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.drafts.config import DraftTraining

if TYPE_CHECKING:
    from builder.drafts.make import TrainedDraft, Watcher
    from builder.drafts.train import Acceptance
    from builder.recipe import Recipe


def check_start_head(recipe: Recipe, config: DraftTraining) -> None:
    """Raises `PlancastError` where a head for the recipe's model cannot go on from `config.start_head`."""
    import zoo
    from builder.drafts.head import HeadConfig
    from builder.drafts.head_file import check_start, find_head
    from builder.tracing.config import load_config

    found = find_head(config.start_head)
    checkpoint = zoo.resolve(recipe.model, trust_remote_code=recipe.trust_remote_code)
    model = load_config(checkpoint, trust_remote_code=recipe.trust_remote_code)
    check_start(found, HeadConfig.of(model, config.vocab_size, config.num_layers))


def train_head(
    recipe: Recipe, artifact: Path, work: Path, out: Path, config: DraftTraining, watcher: Watcher
) -> TrainedDraft:
    """Train a head on the corpus in `work`, and write it into the folder `out`; see `make.train_draft`."""
    import msgspec
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    import zoo
    from builder.drafts.features import read_features, write_features
    from builder.drafts.head import make_head
    from builder.drafts.head_file import HeadFacts, find_head, read_weights, save_head
    from builder.drafts.make import TrainedDraft
    from builder.drafts.student import choose_tokens, to_student_ids
    from builder.drafts.train import train
    from builder.drafts.train_head import HeadTraining
    from runtime.artifact import Artifact

    info = Artifact.open(artifact).manifest.model
    checkpoint = zoo.resolve(recipe.model, trust_remote_code=recipe.trust_remote_code)
    target = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, trust_remote_code=recipe.trust_remote_code
    ).eval()
    write_features(target, work / "corpus", watcher.features)
    examples = read_features(work / "corpus")
    dialogues = [dialogue for dialogue, _ in examples]
    answers = [dialogue.token_ids[dialogue.first :] for dialogue in dialogues]
    token_ids = choose_tokens(answers, info.eos_token_ids, config.vocab_size, info.vocab_size)
    head = make_head(target, token_ids, config.num_layers)
    if config.start_head:
        read_weights(head, find_head(config.start_head))
    del target
    known = np.zeros(info.vocab_size, bool)
    known[token_ids] = True
    training = HeadTraining(head, to_student_ids(token_ids, info.vocab_size), known, config)
    if not config.start_head and not (work / "checkpoint.pt").is_file():
        training.fit_start([example for i, example in enumerate(examples) if i % config.held_out_every])
    acceptance = train(training, examples, config, work, watcher.step)
    num_parameters = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    facts = HeadFacts(
        target=checkpoint.name,
        shape=msgspec.structs.asdict(head.config),
        target_ids=token_ids,
        accepted_by_position=[round(share, 4) for share in acceptance.by_position],
        training=msgspec.structs.asdict(config) | {"dialogues": len(examples)},
    )
    save_head(head, facts, out, _card(recipe, checkpoint.license, config, acceptance, num_parameters))
    return TrainedDraft(out, acceptance, num_parameters)


def _card(
    recipe: Recipe, licence: str | None, config: DraftTraining, acceptance: Acceptance, num_parameters: int
) -> str:
    shares = ", ".join(f"{share:.1%}" for share in acceptance.by_position)
    layers = "one decoder layer" if config.num_layers == 1 else f"{config.num_layers} decoder layers"
    return "\n".join(
        [
            f"# A head for {recipe.model}",
            "",
            f"{num_parameters:,} parameters in int8: {layers} over the model's last hidden states and the "
            f"tokens that followed them (EAGLE), which drafts the model's {config.vocab_size} most frequent tokens. "
            "Embedding and reading head are the model's own. `plancast draft train` trained it on what the model "
            "itself wrote, with no data set.",
            "",
            f"- corpus: {config.corpus_tokens:,} tokens, seed {config.seed}; {config.steps} steps of "
            f"{config.batch_tokens} tokens",
            f"- greedy drafts on held-out text, accepted by position: {shares}",
            f"- tokens that a verification of {config.draft_length} drafted tokens brings: {acceptance.length:.2f}",
            "",
            "Use, in a recipe: `draft_head: NAME_OR_FOLDER` and `speculation: eagle`. To make it again:",
            "",
            f"    {config.command(recipe.name)}",
            "",
            "The weights remain under the licence of the model they were made from"
            + (f" ({licence})." if licence else "."),
            "",
        ]
    )
