"""Rotary embeddings whose frequencies transformers picks at run time, pinned to one table for an engine's life."""

from __future__ import annotations

from typing import Any


def pin_longrope(model: Any, max_context_len: int) -> None:
    """Let each longrope of `model` use one table: the long factors if `max_context_len` exceeds the original context.

    transformers picks the table in each call by the longest position in it. An engine cannot: cached keys would have
    been rotated by another table than new ones. So the longest context that the engine is built for decides.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    init = ROPE_INIT_FUNCTIONS["longrope"]
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type == "longrope":
            inv_freq, _ = init(module.config, seq_len=max_context_len)
            module.inv_freq = inv_freq
            module.rope_type = "default"
        elif isinstance(rope_type, dict) and "longrope" in rope_type.values():
            for layer_type, kind in rope_type.items():
                if kind == "longrope":
                    inv_freq, _ = init(module.config, seq_len=max_context_len, layer_type=layer_type)
                    setattr(module, f"{layer_type}_inv_freq", inv_freq)
            module.rope_type = {k: "default" if v == "longrope" else v for k, v in rope_type.items()}
