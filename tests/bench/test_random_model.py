"""Random checkpoints of a card's shape: what transformers reads, and what is refused."""

from __future__ import annotations

import pytest
from tiny_hf import write_tiny_hf

import bench.random_model
from bench.random_model import weight_shapes, write_random_model
from runtime.errors import PlancastError
from zoo.card import Shape, find_card, load_cards


def test_the_shapes_hold_as_many_parameters_as_the_card_says():
    for card in load_cards().values():
        if card.architecture == "LlamaForCausalLM":
            count = sum(rows * columns for rows, columns in weight_shapes(card.shape).values())
            assert count == card.parameters, card.name


def test_transformers_reads_every_weight_and_no_other(tmp_path, monkeypatch):
    import msgspec
    import torch
    from transformers import AutoModelForCausalLM

    shape = Shape(
        layers=2, hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, head_size=8, vocab_size=600,
        tied_embeddings=False,
    )  # fmt: skip
    small = msgspec.structs.replace(find_card("tinyllama-1.1b-chat"), shape=shape)
    monkeypatch.setattr(bench.random_model, "find_card", lambda name: small)
    monkeypatch.setattr(bench.random_model, "TOKENIZER", str(write_tiny_hf(tmp_path / "tokenizer")))
    count = write_random_model("small", tmp_path / "out", seed=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 600)
    assert torch.isfinite(logits).all()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert write_random_model("small", tmp_path / "out", seed=3) == count  # its own folder is replaced


def test_what_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(PlancastError, match=r"qwen3-0\.6b is a Qwen3ForCausalLM"):
        write_random_model("qwen3-0.6b", tmp_path / "out")
    with pytest.raises(PlancastError, match="no model card 'lama'"):
        write_random_model("lama", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(PlancastError, match="exists and is no model"):
        write_random_model("llama-3.2-1b-instruct", tmp_path / "mine")
    assert not (tmp_path / "out").exists()
