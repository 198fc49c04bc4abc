"""How a model is led to call our operator: its attention function, and the tags that stand for its masks.

transformers routes every attention through `AttentionInterface`; ours turns a call into one custom op. Masks are never
built: the functions that would build them are replaced, for the time of a trace, by functions that return a `MaskTag`,
which reaches the attention as its `attention_mask`. A window that a model states only in its mask is found that way.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.errors import BuildError

if TYPE_CHECKING:
    import torch

IMPLEMENTATION = "plancast"

# Keyword arguments of an attention call that change nothing about a causal, batched, paged attention.
_NEUTRAL_KWARGS = frozenset(
    {
        "scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "output_attentions",
        "use_cache", "cache_position", "position_embeddings", "head_mask", "logits_to_keep", "output_router_logits",
        "output_hidden_states", "return_dict", "cache", "past_key_values", "target_dtype", "layer_idx", "deterministic",
        "token_type_ids", "labels", "cross_attn_layer_idx",
    }
)  # fmt: skip


class MaskTag(NamedTuple):
    """What a mask would have said: tokens that a row sees, itself included (0: all before it)."""

    window: int


def register() -> None:
    """Make `attn_implementation="plancast"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskTag | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that calls `plancast::paged_attention`.

    Args:
        module: the attention layer; its `layer_idx` numbers the node.
        query: [1, Hq, T, D], rotary embedding applied; key [1, Hkv, T, D]; value [1, Hkv, T, Dv].
        attention_mask: the tag of the mask.
        kwargs: scaling, softcap, s_aux, sliding_window as transformers passes them.

    Returns:
        attention [1, T, Hq, Dv], and None in place of the weights.

    Raises:
        BuildError: the layer asks for something that the operator does not do.
    """
    from plugins.paged_attention.torch_op import paged_attention

    layer = getattr(module, "layer_idx", None)
    name = f"{type(module).__name__} (layer {layer})"
    unknown = sorted(k for k, v in kwargs.items() if k not in _NEUTRAL_KWARGS and v is not None and v is not False)
    if unknown:
        raise BuildError(
            f"the attention {name} takes {', '.join(unknown)}, which plancast::PagedAttention does not do; "
            "this model cannot be built"
        )
    if layer is None:
        raise BuildError(f"the attention {type(module).__name__} has no layer_idx; this model cannot be built")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise BuildError(f"the attention {name} is not causal; only causal decoders can be built")
    if not isinstance(attention_mask, MaskTag):
        raise BuildError(
            f"the attention {name} gets a mask that transformers' mask functions did not make "
            f"({type(attention_mask).__name__}); this model cannot be built"
        )
    if key.shape[2] != query.shape[2]:
        raise BuildError(f"the attention {name} attends to {key.shape[2]} keys for {query.shape[2]} queries")

    def flat(x_1HTD: torch.Tensor) -> torch.Tensor:
        return x_1HTD.transpose(1, 2).reshape(x_1HTD.shape[2], x_1HTD.shape[1] * x_1HTD.shape[3])

    num_heads, head_size, v_head_size = query.shape[1], query.shape[3], value.shape[3]
    scale = kwargs.get("scaling")
    out = paged_attention(
        flat(query),
        flat(key),
        flat(value),
        kwargs.get("s_aux"),
        None,
        num_heads,
        key.shape[1],
        head_size,
        v_head_size,
        float(scale) if scale is not None else head_size**-0.5,
        attention_mask.window,
        float(kwargs.get("softcap") or 0.0),
        int(layer),
    )
    return out.reshape(1, query.shape[2], num_heads, v_head_size), None


def _causal(config: Any, *args: Any, **kwargs: Any) -> MaskTag:
    _refuse_custom(config, kwargs)
    return MaskTag(0)


def _sliding(config: Any, *args: Any, **kwargs: Any) -> MaskTag:
    _refuse_custom(config, kwargs)
    return MaskTag(int(config.sliding_window))


def _chunked(config: Any, *args: Any, **kwargs: Any) -> MaskTag:
    raise BuildError(
        f"model type {config.model_type!r} uses chunked attention, which plancast::PagedAttention does not do; "
        "this model cannot be built"
    )


def _bidirectional(config: Any, *args: Any, **kwargs: Any) -> MaskTag:
    raise BuildError(f"model type {config.model_type!r} attends both ways; only causal decoders can be built")


def _refuse_custom(config: Any, kwargs: dict[str, Any]) -> None:
    custom = sorted(
        k for k in ("or_mask_function", "and_mask_function", "block_sequence_ids") if kwargs.get(k) is not None
    )
    if custom or not getattr(config, "is_causal", True):
        what = f"a mask of its own ({', '.join(custom)})" if custom else "a mask that is not causal"
        raise BuildError(f"model type {config.model_type!r} uses {what}; only causal and sliding masks can be built")


_TAGS = {
    "create_causal_mask": _causal,
    "create_sliding_window_causal_mask": _sliding,
    "create_chunked_causal_mask": _chunked,
    "create_bidirectional_mask": _bidirectional,
    "create_bidirectional_sliding_window_mask": _bidirectional,
}


@contextlib.contextmanager
def mask_tags(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the mask functions that the modules of `model` call return tags."""
    modules = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in modules:
            for name, tag in _TAGS.items():
                if hasattr(module, name):
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, tag)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
