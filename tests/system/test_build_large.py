"""Case 26: more than 2 GB of weights, in one tensor even, go through export, compilation and load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tiny_build import plancast_home, tiny_recipe
from tiny_tokenizer import write_tiny_tokenizer

from builder.build import build
from runtime.artifact import Artifact
from runtime.executor import StepBatch
from runtime.executors import open_executor
from runtime.memory import available_memory

VOCAB, HIDDEN = 540_000, 1024  # the embedding takes 2.2 GB in f32
NEEDED = 9 << 30  # bytes of memory


def write_zeros(folder: Path) -> Path:
    """A Llama of one layer whose bf16 weights are all zero: a sparse file, a gigabyte that takes no disk."""
    write_tiny_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128,
        "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), f"{layer}.input_layernorm": (HIDDEN,),
        f"{layer}.post_attention_layernorm": (HIDDEN,), f"{layer}.self_attn.q_proj": (256, HIDDEN),
        f"{layer}.self_attn.k_proj": (128, HIDDEN), f"{layer}.self_attn.v_proj": (128, HIDDEN),
        f"{layer}.self_attn.o_proj": (HIDDEN, 256), f"{layer}.mlp.gate_proj": (128, HIDDEN),
        f"{layer}.mlp.up_proj": (128, HIDDEN), f"{layer}.mlp.down_proj": (HIDDEN, 128),
    }  # fmt: skip
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(available_memory().bytes < NEEDED, reason=f"needs {NEEDED >> 30} GiB of free memory")
def test_case_26_more_than_two_gigabytes_in_one_tensor(tmp_path: Path) -> None:
    recipe = tiny_recipe(write_zeros(tmp_path / "model"), backend={"blob": False}, parity={"enabled": False})
    with plancast_home(tmp_path / "home"):
        build(recipe, tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact", verify="full")
    assert artifact.manifest.weights_bytes["f32"] > 4 * VOCAB * HIDDEN > 2**31
    executor = open_executor(artifact)
    try:
        executor.allocate(2)
        # Lengths are dynamic: one token, then several, of a sequence that crosses a block.
        past = 0
        for count in (1, 40, 3):
            tokens = np.arange(VOCAB - count, VOCAB, dtype=np.int64)  # rows beyond the first 2 GB
            end = past + count
            logits = executor.run(
                StepBatch(
                    token_ids=tokens,
                    positions=np.arange(past, end, dtype=np.int64),
                    past_lens=np.array([past], np.int32),
                    query_starts=np.array([0, count], np.int32),
                    block_ids=np.arange(-(-end // 32), dtype=np.int32),
                    block_starts=np.array([0, -(-end // 32)], np.int32),
                    max_context_len=end,
                    logits_rows=np.array([count - 1], np.int64),
                )
            )
            assert logits.shape == (1, VOCAB)
            np.testing.assert_array_equal(logits, 0)
            past = end
    finally:
        executor.close()
