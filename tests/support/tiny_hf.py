"""A tiny random llama as a Hugging Face style folder, and the same kind of model as a GGUF file. No torch needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_tokenizer import CHATML, tiny_backend, write_tiny_tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INTERMEDIATE, VOCAB, CONTEXT = 2, 64, 4, 2, 16, 96, 512, 256

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float32", "hidden_act": "silu",
}  # fmt: skip


def tiny_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,), f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (HEADS * HEAD, HIDDEN), f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            f"{layer}.mlp.gate_proj": (INTERMEDIATE, HIDDEN), f"{layer}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }  # fmt: skip
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_hf(folder: Path, *, shards: int = 1, seed: int = 0, config: dict[str, Any] | None = None) -> Path:
    """Write the model with a byte-level tokenizer, in one safetensors file or several with an index."""
    from safetensors.numpy import save_file

    write_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    weights = tiny_weights(seed)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(weights.items())[i::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight."""
    base = name.removesuffix(".weight")
    if base.startswith("model.layers."):
        _, _, index, rest = base.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[rest]}.weight"
    return f"{_GGUF_NAMES[base]}.weight"


def write_tiny_gguf(
    path: Path,
    *,
    quantization: str = "Q8_0",
    architecture: str = "llama",
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, NDArray[np.float32]] | None = None,
    seed: int = 0,
) -> dict[str, NDArray[np.float32]]:
    """Write the model as llama.cpp does (queries and keys permuted); return what its weights dequantize to, as HF."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import dequantize, quantize

    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    backend = tiny_backend()
    vocab = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(vocab.index("<|im_start|>"))
    writer.add_eos_token_id(vocab.index("<|im_end|>"))
    writer.add_chat_template(CHATML)
    kept = {}
    for name, weight in tiny_weights(seed).items():
        weight = weight[: len(vocab)] if name.startswith("model.embed") else weight
        kind = GGMLQuantizationType.F32 if weight.ndim == 1 else GGMLQuantizationType[quantization]
        stored = quantize(_permuted(name, weight), kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        kept[name] = _unpermuted(name, dequantize(stored, kind).reshape(weight.shape))
    for name, weight in (extra_tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _heads(name: str) -> int:
    return HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0


def _permuted(name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    heads = _heads(name)
    return weight if not heads else weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


def _unpermuted(name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    heads = _heads(name)
    return weight if not heads else weight.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
