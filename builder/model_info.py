"""What the manifest says about a model, read from its checkpoint's config files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import BuildError
from runtime.manifest import ModelInfo
from runtime.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from zoo.checkpoint import Checkpoint


def model_info(checkpoint: Checkpoint, *, max_context_len: int) -> ModelInfo:
    """The facts about `checkpoint`. A config that names no context length counts as made for `max_context_len` tokens.

    Raises:
        BuildError: config.json lacks a size that every decoder has.
    """
    config = text_config(checkpoint.config)
    generation = read_json(checkpoint.folder / "generation_config.json")
    tokenizer = Tokenizer.load(checkpoint.folder)
    architectures = checkpoint.config.get("architectures") or ["unknown"]
    return ModelInfo(
        name=checkpoint.name,
        architecture=str(architectures[0]),
        family=str(checkpoint.config.get("model_type")),
        source=checkpoint.source,
        revision=checkpoint.revision,
        sha256=checkpoint.sha256,
        license=checkpoint.license,
        context_length=checkpoint.context_length or max_context_len,
        vocab_size=_size(config, checkpoint.folder, "vocab_size"),
        num_layers=_size(config, checkpoint.folder, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden_size=_size(config, checkpoint.folder, "hidden_size", "n_embd", "d_model"),
        num_parameters=num_parameters(checkpoint),
        bos_token_id=_first(tokenizer.bos_token_id, *_ids(generation, config, "bos_token_id")),
        eos_token_ids=_eos(generation, config, tokenizer),
        pad_token_id=_first(tokenizer.pad_token_id, *_ids(generation, config, "pad_token_id")),
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (models of several kinds of input nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def num_parameters(checkpoint: Checkpoint) -> int:
    """Parameters in the checkpoint's files."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors().values())


def _eos(generation: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Tokens that end an answer: those of generation_config.json (else config.json), and the tokenizer's own."""
    found = _ids(generation, config, "eos_token_id")
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(found))


def _ids(generation: dict[str, Any], config: dict[str, Any], key: str) -> list[int]:
    value = generation.get(key)
    if value is None:
        value = config.get(key)
    return [int(item) for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _size(config: dict[str, Any], folder: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    kind = config.get("model_type")
    raise BuildError(f"{folder / 'config.json'} (model_type {kind!r}) has no {names[0]}, so it is no decoder's config")
