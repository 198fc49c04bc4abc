"""Engines of checkpoints that are quantized already: built with their integers, and equal to the dense model."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_checkpoints import write_packed
from tiny_build import plancast_home, tiny_recipe, tiny_workshop
from tiny_hf import write_tiny_gguf

from builder.build import run_build
from runtime.errors import BuildError


@pytest.mark.parametrize("form", ["gptq-act-order", "Q4_1"])
def test_the_engine_holds_the_integers_and_loses_nothing(tmp_path: Path, form: str) -> None:
    if form.startswith("Q"):
        write_tiny_gguf(tmp_path / "model.gguf", quantization=form)
        model = f"gguf:{tmp_path / 'model.gguf'}"
    else:
        write_packed(tmp_path / "model", form)
        model = str(tmp_path / "model")
    # OpenVINO's own products: ours round activations to 15 bits, which this random model's huge logits show.
    sections = {"weights": {"dtype": "checkpoint"}, "backend": {"linear": "openvino"}}
    recipe = tiny_recipe(model, name="tiny-checkpoint", **sections)
    with plancast_home(tiny_workshop() / "home"):
        result = run_build(recipe, tmp_path / "artifact")
    kinds = result.manifest.weights_bytes
    assert kinds["uint4"] > 0
    parity = result.manifest.parity
    assert parity is not None
    assert parity.mean_kl < 1e-6
    # Sums in another order decide between two tokens that are as good as equally likely: one position of the thousands.
    assert round((1 - parity.top1_agreement) * parity.positions) <= 1
    assert parity.greedy_matching_prompts == parity.greedy_prompts


def test_a_dense_checkpoint_has_nothing_to_keep(tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_workshop() / "model", weights={"dtype": "checkpoint"})
    with plancast_home(tiny_workshop() / "home"), pytest.raises(BuildError, match="holds no quantized weights"):
        run_build(recipe, tmp_path / "artifact")
