"""Reading a checkpoint's config, and refusing what a trace would get silently wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from builder import families
from runtime.errors import BuildError

if TYPE_CHECKING:
    from builder.recipe import Task
    from zoo.checkpoint import Checkpoint

# How the classes end whose checkpoints can be built, by task. An embedding needs no head: base models will do.
_SUFFIXES = {"generate": ("ForCausalLM", "LMHeadModel"), "embed": ("ForCausalLM", "LMHeadModel", "Model")}


def load_config(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Any:
    """The checkpoint's `PretrainedConfig`.

    Raises:
        BuildError: transformers does not know the model type, or finds its settings wrong.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config may be wrong in any way, and transformers raises as many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        model_type = checkpoint.config.get("model_type")
        raise BuildError(
            f"{checkpoint.name}: its config.json (model_type {model_type!r}) is refused: {reason}"
        ) from error


def check_config(config: Any, *, max_context_len: int, task: Task = "generate") -> None:
    """Refuse the configs that cannot be traced, or would trace into a graph that computes something else.

    Raises:
        BuildError: naming the family or setting, and what can be done.
    """
    kind = f"model type {config.model_type!r}"
    if reason := families.REFUSED.get(config.model_type):
        raise BuildError(f"{kind} cannot be built: {reason}")
    if getattr(config, "is_encoder_decoder", False):
        raise BuildError(f"{kind} is an encoder-decoder; only decoders (causal language models) can be built")
    architectures = getattr(config, "architectures", None) or []
    if architectures and not any(name.endswith(_SUFFIXES[task]) for name in architectures):
        base = any(name.endswith("Model") for name in architectures)
        hint = "; a base model has no head, and can be built with task: embed" if base else ""
        raise BuildError(f"{', '.join(architectures)} is not a causal language model (...ForCausalLM){hint}")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - families.LAYER_TYPES):
        raise BuildError(
            f"{kind} has layers of kind {', '.join(unknown)}; "
            f"only {', '.join(sorted(families.LAYER_TYPES))} can be built"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type == "dynamic":
            raise BuildError(
                f"{kind} uses dynamic-NTK rotary embeddings, whose frequencies change with the sequence's length, so "
                "that cached keys become wrong; set `rope_parameters` in its config.json to a fixed kind such as yarn"
            )
        if rope_type not in families.ROPE_TYPES:
            raise BuildError(
                f"{kind} uses rotary embeddings of kind {rope_type!r}, not one of {sorted(families.ROPE_TYPES)}"
            )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and max_context_len > longest:
        raise BuildError(
            f"limits.max_context_len is {max_context_len}, and the model was made for {longest} tokens "
            f"(max_position_embeddings); set it to {longest} or less"
        )


def num_attention_layers(config: Any) -> int:
    """How many layers of the model attend: all of them, of the configs that `check_config` lets through."""
    return int(config.num_hidden_layers)


def _rope_types(parameters: Any) -> Iterator[str]:
    """The kinds of rotary embedding in `config.rope_parameters`, which may hold one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters["rope_type"]
    for value in parameters.values():
        yield from _rope_types(value)
