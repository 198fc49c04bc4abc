"""Reading a checkpoint's config, and refusing what a trace would get silently wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import BuildError

if TYPE_CHECKING:
    from zoo.checkpoint import Checkpoint


def load_config(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Any:
    """The checkpoint's `PretrainedConfig`.

    Raises:
        BuildError: transformers does not know the model type, or the config needs code that the recipe does not trust.
    """
    from transformers import AutoConfig

    if "auto_map" in checkpoint.config and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if checkpoint.config.get("model_type") not in CONFIG_MAPPING:
            raise BuildError(
                f"{checkpoint.name} brings its own modelling code ({checkpoint.config['auto_map']}); "
                "read that code, then set `trust_remote_code: true` in the recipe to run it"
            )
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError) as error:
        model_type = checkpoint.config.get("model_type")
        reason = (str(error).strip().splitlines() or ["?"])[0][:300]
        raise BuildError(
            f"{checkpoint.name}: its config.json (model_type {model_type!r}) cannot be read: {reason}"
        ) from error
