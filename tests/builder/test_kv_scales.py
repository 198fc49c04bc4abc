"""Static scales of fp8 KV caches: calibrated against what Hugging Face keeps in its own cache, and built in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_build import plancast_home, tiny_recipe, tiny_workshop
from tiny_hf import CONTEXT, LAYERS, write_tiny_hf
from transformers import AutoModelForCausalLM, DynamicCache

from builder.build import run_build
from builder.quantization.kv_scales import StaticScales, kv_scales
from builder.quantization.rounding import quantize
from builder.quantization.scheme import Scheme
from builder.recipe import KvConfig
from plugins.paged_attention.kv_formats import LARGEST, rotate
from zoo.checkpoint import Checkpoint, open_folder
from zoo.progress import Silent
from zoo.quantized import QuantizedRef

IDS = np.random.default_rng(0).integers(0, 400, (6, CONTEXT))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(write_tiny_hf(tmp_path_factory.mktemp("model")), name="tiny")


def cached(model: torch.nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values `[B, H, T, D]` of each layer, as Hugging Face caches them."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.from_numpy(IDS), past_key_values=cache, use_cache=True)
    return [(layer.keys.numpy(), layer.values.numpy()) for layer in cache.layers]  # type: ignore[union-attr]


def load(checkpoint: Checkpoint) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()


def test_the_largest_number_read_has_a_binade_above_it(checkpoint: Checkpoint) -> None:
    kv = KvConfig(key="fp8_e4m3", value="fp8_e5m2", scales="static", rotate="key")
    found = kv_scales(checkpoint, kv, IDS, {}, {}, Silent())
    wanted = {
        index: StaticScales(
            2 * float(np.abs(rotate(key)).max()) / LARGEST["fp8_e4m3"],
            2 * float(np.abs(value).max()) / LARGEST["fp8_e5m2"],
        )
        for index, (key, value) in enumerate(cached(load(checkpoint)))
    }
    assert sorted(found) == list(range(LAYERS))
    for index, scales in wanted.items():
        np.testing.assert_allclose(found[index], scales, rtol=1e-4)


def test_scales_are_of_the_weights_that_the_engine_has(checkpoint: Checkpoint) -> None:
    """AWQ moves scales between values and what comes after them."""
    names = [f"model.layers.{index}.self_attn.v_proj.weight" for index in range(LAYERS)]
    model = load(checkpoint)
    parameters = dict(model.named_parameters())
    dense, stored = (
        parameters[names[0]].detach().numpy() * 3,
        quantize(parameters[names[1]].detach().numpy(), Scheme("int4")),
    )
    with torch.no_grad():
        parameters[names[0]].mul_(3)
        parameters[names[1]].copy_(torch.from_numpy(stored.dequantize()))
    ref = QuantizedRef(stored.format, stored.values.shape, lambda: stored)  # type: ignore[arg-type]
    kv = KvConfig(key="int8", value="fp8_e4m3", scales="static")
    found = kv_scales(checkpoint, kv, IDS, {names[1]: ref}, {names[0]: dense}, Silent())
    for index, (_, value) in enumerate(cached(model)):
        assert found[index].key == 0  # int8 has a scale a cell
        assert found[index].value == pytest.approx(2 * np.abs(value).max() / 448, rel=1e-4)


@pytest.mark.parametrize("rotate_", ["none", "both"])
def test_an_engine_with_static_scales(tmp_path: Path, rotate_: str) -> None:
    """Half of bf16's bytes to the bit, and as near to the model as with a scale a cell."""
    kl = {}
    for scales in ("dynamic", "static"):
        kv = {"key": "fp8_e4m3", "value": "fp8_e4m3", "scales": scales, "rotate": rotate_}
        recipe = tiny_recipe(
            tiny_workshop() / "model",
            kv=kv,
            weights={"dtype": "int4", "method": "gptq", "calibration": {"samples": 4, "tokens": CONTEXT}},
        )
        with plancast_home(tiny_workshop() / "home"):
            manifest = run_build(recipe, tmp_path / f"{scales}-{rotate_}").manifest
        assert manifest.weights_bytes["uint4"] > 0
        (layer, *_), parity = manifest.kv.layers, manifest.parity
        assert (layer.key_scale_bytes == 0) is (scales == "static")
        assert parity is not None
        kl[scales] = parity.mean_kl
    assert kl["static"] < 2 * kl["dynamic"]
