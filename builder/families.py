"""What plancast knows about single model families. Everything else is found out from the model itself.

docs/families.md lists the families that are tested.
"""

from __future__ import annotations

# Model types that are refused before anything is built, with the reason that a person reads. The checks on the traced
# graph would refuse most of them as well; here they are named in words.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("bloom", "falcon", "mpt", "gpt_neo"), "its attention is written out and does not go through AttentionInterface"
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"),
        "it carries a recurrent state from token to token, for which there is no operator",
    ),
    **dict.fromkeys(
        ("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"),
        "some of its layers carry a recurrent state from token to token, for which there is no operator",
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), "some of its layers are convolutions over the tokens, for which there is no operator"
    ),
    **dict.fromkeys(
        ("qwen3_next", "minimax", "kimi_linear"),
        "some of its layers are linear attention, for which there is no operator",
    ),
    "llama4_text": "it attends in chunks, which plancast::PagedAttention does not do",
    "blt": "it groups bytes into patches, which mixes tokens outside attention",
}

# Kinds of layer that `config.layer_types` may name.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Rotary embeddings whose frequencies follow from the config alone (longrope: and the longest context, see rope.py).
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "longrope", "proportional"})
