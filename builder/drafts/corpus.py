"""The corpus of a draft: what the target writes by itself, with its probabilities or hidden states.

The chat template's user turn is left open and the target goes on: that is a question. It goes back through the
template, and the target answers it, two times of three greedily (`builder.drafts.writer`). So many dialogues are a file
of their own, written whole or not at all: a run that was stopped goes on after the last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from builder.drafts.config import CORPUS_FIELDS, DraftTraining
from builder.drafts.writer import Dialogue, DialogueWriter
from runtime.errors import PlancastError


def write_corpus(
    artifact: Path, folder: Path, config: DraftTraining, report: Callable[[int], None], num_threads: int | None = None
) -> None:
    """Write dialogues into `folder` until they hold `config.corpus_tokens` tokens. `report(tokens so far)`.

    Raises `PlancastError` where the folder holds a corpus made with other settings, or the engine does not load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder / "corpus.json", config.key(CORPUS_FIELDS) + f" {artifact.name}")
    shards = sorted(folder.glob("dialogues-*.npz"))
    written = sum(sum(len(dialogue.token_ids) for dialogue in read_shard(shard)) for shard in shards)
    report(written)
    if written >= config.corpus_tokens:
        return
    number = len(shards)
    with DialogueWriter(artifact, config, num_threads) as writer:
        for dialogues in writer.write(number * config.batch_requests):
            save_shard(folder / f"dialogues-{number:05d}.npz", dialogues)
            written += sum(len(dialogue.token_ids) for dialogue in dialogues)
            number += 1
            report(written)
            if written >= config.corpus_tokens:
                return


def save_shard(path: Path, dialogues: list[Dialogue]) -> None:
    """Write dialogues to one file, beside its final name first."""
    arrays = {
        "token_ids": np.concatenate([d.token_ids for d in dialogues]),
        "lengths": np.array([len(d.token_ids) for d in dialogues]),
        "firsts": np.array([d.first for d in dialogues]),
        "top_ids": np.concatenate([d.top_ids for d in dialogues]),
        "top_p": np.concatenate([d.top_p for d in dialogues]),
    }
    hidden = [d.hidden for d in dialogues if d.hidden is not None]
    if hidden:
        arrays["hidden"] = np.concatenate(hidden)
    beside = path.with_suffix(".writing")
    with open(beside, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(beside, path)


def read_shard(path: Path) -> list[Dialogue]:
    """What `save_shard` wrote."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    dialogues, token, answer = [], 0, 0
    for length, first in zip(arrays["lengths"].tolist(), arrays["firsts"].tolist(), strict=True):
        written = slice(answer, answer + length - first)
        hidden = arrays["hidden"][written] if "hidden" in arrays else None
        own = arrays["token_ids"][token : token + length]
        dialogues.append(Dialogue(own, first, arrays["top_ids"][written], arrays["top_p"][written], hidden))
        token, answer = token + length, written.stop
    return dialogues


def read_corpus(folder: Path) -> Iterator[Dialogue]:
    """Every dialogue with an answer, in the order in which they were written."""
    for path in sorted(folder.glob("dialogues-*.npz")):
        yield from answered(path)


def answered(path: Path) -> list[Dialogue]:
    """The dialogues of a shard that have an answer."""
    return [dialogue for dialogue in read_shard(path) if len(dialogue.token_ids) > dialogue.first]


def _check_same(path: Path, key: str) -> None:
    if path.is_file() and json.loads(path.read_text())["key"] != key:
        raise PlancastError(
            f"{path.parent} holds a corpus that was made with other settings: give another --work folder, or remove it"
        )
    path.write_text(json.dumps({"key": key}) + "\n")
