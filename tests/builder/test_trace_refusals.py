"""What a trace would get silently wrong is refused, with the reason in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import open_tiny_checkpoint, tiny_config, tiny_model, write_tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from builder import families
from builder.trace import trace
from runtime.errors import BuildError

SMALL = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSUPPORTED = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"intermediate_size": 48, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 4},
}


def write_config(folder: Path, model_type: str, **settings: Any) -> Path:
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    config.save_pretrained(folder)
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def refused(folder: Path, max_context_len: int = 32) -> str:
    with pytest.raises(BuildError) as caught:
        trace(open_tiny_checkpoint(folder), max_context_len=max_context_len)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", sorted(UNSUPPORTED))
def test_a_family_without_an_operator_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    message = refused(write_config(tmp_path, model_type, **UNSUPPORTED[model_type]))
    assert model_type in message
    assert families.REFUSED[model_type] in message


@pytest.mark.parametrize("model_type", sorted(UNSUPPORTED))
def test_the_checks_refuse_such_a_family_without_its_name(model_type: str, tmp_path: Path, monkeypatch) -> None:
    """The list of names is a courtesy: the checks of config and graph stand without it."""
    monkeypatch.setattr(families, "REFUSED", {})
    refused(write_config(tmp_path, model_type, **UNSUPPORTED[model_type]))


def test_attention_that_bypasses_the_interface_is_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(families, "REFUSED", {})
    message = refused(write_config(tmp_path, "gpt_neo", **UNSUPPORTED["gpt_neo"]))
    assert "2 layers" in message or "cannot" in message


def test_chunked_attention(tmp_path: Path) -> None:
    settings = {"intermediate_size": 48, "intermediate_size_mlp": 48, "num_key_value_heads": 2, "head_dim": 8}
    write_config(tmp_path, "llama4_text", num_local_experts=2, attention_chunk_size=8, **settings)
    assert "chunk" in refused(tmp_path)


def test_an_encoder_decoder(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", d_model=32, num_layers=1, num_heads=4, d_kv=8, vocab_size=67).save_pretrained(tmp_path)
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "encoder-decoder" in refused(tmp_path)


def test_dynamic_ntk_rope(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    change_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "dynamic-NTK" in refused(tmp_path)


def test_more_context_than_the_model_has(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    message = refused(tmp_path, max_context_len=65)
    assert "65" in message
    assert "64" in message


def test_an_unknown_model_type(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    change_config(tmp_path, model_type="no_such_model")
    assert "no_such_model" in refused(tmp_path)


def test_an_architecture_that_is_no_causal_language_model(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    change_config(tmp_path, architectures=["LlamaForSequenceClassification"])
    assert "LlamaForSequenceClassification" in refused(tmp_path)


@pytest.mark.parametrize("settings", [{"hidden_size": "many"}, {"num_attention_heads": 0}, {"hidden_act": "nope"}])
def test_a_config_with_wrong_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    change_config(tmp_path, **settings)
    refused(tmp_path)


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def test_missing_weights_are_listed(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    names = ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    edit_weights(tmp_path, lambda weights: [weights.pop(name) for name in names])
    message = refused(tmp_path)
    assert "2 weights" in message
    assert all(name in message for name in names)


def test_many_missing_weights_are_counted(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: [weights.pop(name) for name in list(weights) if ".layers." in name])
    assert "and 10 more" in refused(tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(32, 31)}))
    message = refused(tmp_path)
    assert name in message
    assert "[32, 31]" in message
    assert "[32, 32]" in message


def test_weights_that_are_quantized_already(tmp_path: Path) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(32, 32, dtype=torch.int8)}))
    message = refused(tmp_path)
    assert name in message
    assert "I8" in message


def test_two_models_do_not_share_the_attention_setting(tmp_path: Path) -> None:
    """`from_config` keeps the config it is given: a trace must not change the one that its caller holds."""
    config = tiny_config("llama")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny_model(config).save_pretrained(tmp_path)
    trace(open_tiny_checkpoint(tmp_path), max_context_len=32)
    assert model.config._attn_implementation == "eager"
