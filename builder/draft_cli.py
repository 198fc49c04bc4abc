"""`plancast draft train`."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from builder.drafts.train import Acceptance


def register(app: typer.Typer) -> None:
    draft = typer.Typer(help="Small drafts for speculation, for any model.", no_args_is_help=True)
    draft.callback()(_group)
    draft.command("train")(train)
    app.add_typer(draft, name="draft")


def _group() -> None:
    pass


def train(
    recipe: Annotated[str, typer.Argument(help="The target's recipe.")],
    artifact: Annotated[
        Path | None, typer.Option(help="The target's artifact, which writes the corpus. Default: artifacts/RECIPE.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The draft's artifact. Default: artifacts/RECIPE-draft.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Corpus and checkpoints, to go on from. Default: OUT.training.")
    ] = None,
    kind: Annotated[
        Literal["head", "model"],
        typer.Option(help="A head on the target's hidden states, for its own artifact; or a model with an engine."),
    ] = "head",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the target writes.")] = 200_000,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 600,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Decoder layers: of a head (default: 1); of a model, cut from the target (2)."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=64, help="Most frequent tokens that the draft knows.")] = 8192,
    learning_rate: Annotated[float, typer.Option(min=1e-7)] = 6e-4,
    passes: Annotated[
        int, typer.Option(min=1, max=8, help="Of a head: positions of a draft that the second half trains on.")
    ] = 3,
    start_head: Annotated[
        str, typer.Option(help="Of a head: the head (a name or a folder) that it goes on from, on another corpus.")
    ] = "",
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a step.")] = 2048,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    max_answer: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 192,
    batch_requests: Annotated[int, typer.Option(min=1, help="Requests that write side by side.")] = 32,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a draft with no data set: the target writes the text. Started again, it goes on where it stopped; with
    fewer --steps than it has behind it, it writes the best so far."""
    from builder.drafts.config import DraftTraining
    from builder.drafts.make import train_draft
    from builder.recipe import load_recipe

    config = DraftTraining(
        seed=seed,
        kind=kind,
        corpus_tokens=tokens,
        steps=steps,
        num_layers=layers or 0,
        vocab_size=vocab_size,
        learning_rate=learning_rate,
        passes=passes,
        batch_tokens=batch_tokens,
        evaluate_every=evaluate_every,
        max_answer=max_answer,
        batch_requests=batch_requests,
        start_head=start_head,
    )
    loaded = load_recipe(recipe)
    target = artifact or Path("artifacts") / loaded.name
    made = out or Path("artifacts") / f"{loaded.name}-{'head' if kind == 'head' else 'draft'}"
    folder = work or made.with_name(made.name + ".training")
    watcher = _Progress(config.corpus_tokens, config.steps, quiet=quiet)
    try:
        result = train_draft(loaded, target, folder, made, config, watcher, threads)
    except KeyboardInterrupt:
        watcher.stopped()
        raise
    if as_json:
        figures = {
            "artifact": str(result.artifact),
            "num_parameters": result.num_parameters,
            "accepted_by_position": result.acceptance.by_position,
            "mean_acceptance_length": result.acceptance.length,
        }
        print(json.dumps(figures, indent=2))
        return
    shares = " ".join(f"{share:.0%}" for share in result.acceptance.by_position)
    if kind == "head":
        follow = f"plancast build {recipe} --set draft_head={result.artifact} --set speculation=eagle"
    else:
        follow = (
            f"plancast generate {target} --chat 'Hello!' --speculative-config '{{\"model\": \"{result.artifact}\"}}'"
        )
    print(
        f"{result.artifact}: {result.num_parameters / 1e6:.1f} M parameters; held-out acceptance by position {shares}, "
        f"{result.acceptance.length:.2f} tokens a verification\n"
        f"next: {follow}"
    )


class _Progress:
    """Lines on stderr, at most one every few seconds but for what matters."""

    def __init__(self, tokens: int, steps: int, *, quiet: bool):
        self._tokens, self._steps, self._quiet = tokens, steps, quiet
        self._started = time.monotonic()
        self._kept = 0  # the last step with a checkpoint

    def corpus(self, tokens: int) -> None:
        self._say(f"corpus: {min(tokens, self._tokens):,} of {self._tokens:,} tokens")

    def features(self, files: int) -> None:
        self._say(f"hidden states: {files} files")

    def step(self, step: int, loss: float, acceptance: Acceptance | None) -> None:
        if acceptance is not None:
            self._kept = step
            shown = "" if math.isnan(loss) else f", loss {loss:.3f}"
            shares = " ".join(f"{share:.0%}" for share in acceptance.by_position)
            self._say(f"step {step} of {self._steps}{shown}: accepted {shares}, {acceptance.length:.2f} a verification")

    def stopped(self) -> None:
        best = f"; with --steps {self._kept} it writes the best so far" if self._kept else ""
        self._say(f"stopped: the same command goes on from here{best}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            typer.echo(f"{time.monotonic() - self._started:7.0f} s  {text}", err=True)
