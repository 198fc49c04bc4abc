"""Tiny random checkpoints of many model families, with weights large enough that a mistake shows in the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.checkpoint import Checkpoint, find_weight_files

VOCAB_SIZE = 67

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

# name -> (model type, settings beside the base). Windows are shorter than the test's sequences, so that they matter.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "ministral": ("ministral", {"sliding_window": 5, "layer_types": _ALTERNATING, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 10},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True, "num_key_value_heads": 4}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "num_hidden_layers": 2}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "head_dim": 8, "use_qkv_bias": True}),
    "stablelm-qk-norm": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt_neox-sequential": ("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": False}),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "multi_query": True}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 5, "layer_types": _ALTERNATING}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"sliding_window": 5, "layer_types": _ALTERNATING, "head_dim": 8}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm": ("glm", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "glm4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "nemotron": ("nemotron", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "exaone4": ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "helium": ("helium", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "persimmon": ("persimmon", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "biogpt": ("biogpt", {}),
    "codegen": ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}


def tiny_config(name: str, **overrides: Any) -> Any:
    """The `PretrainedConfig` of a family in `FAMILIES`."""
    from transformers import AutoConfig

    model_type, settings = FAMILIES[name]
    return AutoConfig.for_model(model_type, **{**_BASE, **settings, **overrides})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A random model of `config` in f32 with eager attention: the truth that a traced graph is compared with."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (2.0 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.3)
    return model.eval()


def open_tiny_checkpoint(folder: Path) -> Checkpoint:
    """The folder as a checkpoint, without a tokenizer: a trace needs none."""
    config = json.loads((folder / "config.json").read_text())
    files = tuple(path.resolve() for path in find_weight_files(folder))
    return Checkpoint(folder.name, folder, "folder", None, None, None, config, files=files)


def write_tiny_checkpoint(name: str, folder: Path, seed: int = 0, dtype: Any = None, **overrides: Any) -> Any:
    """Save a random model of the family into `folder` (config.json, model.safetensors) and return the model (f32)."""
    import torch

    model = tiny_model(tiny_config(name, **overrides), seed)
    if dtype is not None:  # of the weights alone: rope tables stay f32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
    state = {name: weight.to(dtype or torch.float32) for name, weight in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    return model


def write_traced_llama(folder: Path) -> tuple[Any, Path]:
    """A tiny Llama with biases in `folder`: transformers' model, and the path of its traced graph (64 tokens)."""
    import onnx_ir as ir

    from builder.trace import trace

    hf = write_tiny_checkpoint("llama-tied-bias", folder)
    ir.save(trace(open_tiny_checkpoint(folder), max_context_len=64), folder / "traced.onnx")
    return hf, folder / "traced.onnx"
