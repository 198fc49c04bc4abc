"""`plancast bench random-model`: a checkpoint of a card's shape with random weights, to measure a size not at hand.

Speed depends on shapes, not on what a model knows. The tokenizer is that of a model that can be pulled, so prompts and
conversions work as they do for any checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from runtime.errors import PlancastError
from zoo.card import ModelCard, Shape, find_card
from zoo.models import resolve
from zoo.progress import Progress, Silent
from zoo.store import require_disk, staged_folder

TOKENIZER = "smollm2-135m-instruct"
_SIDES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_STD = 0.02  # transformers' initializer_range


def write_random_model(card: str, out: Path, *, seed: int = 0, progress: Progress | None = None) -> int:
    """Write config.json, model.safetensors (bf16, normal, deviation 0.02) and a tokenizer into the folder `out`.

    `card` is one of `plancast zoo list` with Llama's layers. RoPE is plain, whatever scaling the model has. Returns the
    number of parameters. Raises `PlancastError`: no such card, another layout, a folder that holds something else, too
    little disk.
    """
    progress = progress or Silent()
    model = find_card(card)
    if model.architecture != "LlamaForCausalLM":
        known = "LlamaForCausalLM"
        raise PlancastError(f"{card} is a {model.architecture}; random weights are only made for {known}")
    if out.exists() and not (out / "config.json").is_file() and any(out.iterdir()):
        raise PlancastError(f"{out} exists and is no model: choose another folder")
    shapes = weight_shapes(model.shape)
    count = sum(rows * columns for rows, columns in shapes.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    require_disk(out.parent, 2 * count, f"{card} with random weights")
    tokenizer = resolve(TOKENIZER, progress=progress).folder
    with staged_folder(out) as folder:
        _write_weights(shapes, folder / "model.safetensors", seed, lambda n: progress.update("weights", n, len(shapes)))
        (folder / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
        for name in _SIDES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    return count


def weight_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each weight by its Hugging Face name; a norm's has one row, and is written as a vector."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    shapes = {"model.embed_tokens": (shape.vocab_size, hidden), "model.norm": (1, hidden)}
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm": (1, hidden),
            f"{layer}.post_attention_layernorm": (1, hidden),
            f"{layer}.self_attn.q_proj": (q, hidden),
            f"{layer}.self_attn.k_proj": (kv, hidden),
            f"{layer}.self_attn.v_proj": (kv, hidden),
            f"{layer}.self_attn.o_proj": (hidden, q),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
    if not shape.tied_embeddings:
        shapes["lm_head"] = (shape.vocab_size, hidden)
    return {f"{name}.weight": size for name, size in shapes.items()}


def _write_weights(shapes: dict[str, tuple[int, int]], path: Path, seed: int, on_weight: Callable[[int], None]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for number, (name, (rows, columns)) in enumerate(shapes.items()):
        if rows == 1:
            weights[name] = torch.ones(columns, dtype=torch.bfloat16)
        else:
            weights[name] = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=_STD, generator=generator)
        on_weight(number + 1)
    save_file(weights, path, metadata={"format": "pt"})


def _config(card: ModelCard) -> dict[str, object]:
    shape = card.shape
    return {
        "architectures": [card.architecture],
        "model_type": card.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": card.context_length,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
