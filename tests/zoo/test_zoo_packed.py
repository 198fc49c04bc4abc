"""Checkpoints that others quantized: every weight bit for bit what its format says, dense and as integers."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from packed_checkpoints import write_packed
from safetensors.numpy import load_file, save_file
from tiny_hf import tiny_weights

import zoo
from runtime.errors import ZooError
from zoo.formats.side_file import read_tensor
from zoo.quantized import WeightFormat

FORMS = {
    "gptq": WeightFormat("uint4", 32, zero=True),
    "gptq-v2": WeightFormat("uint4", 32, zero=True),
    "gptq-8": WeightFormat("uint8", 32, zero=True),
    "gptq-act-order": WeightFormat("uint4", 32, zero=True),
    "awq": WeightFormat("uint4", 32, zero=True),
    "ct-int8": WeightFormat("int8", 64),
    "ct-int8-group": WeightFormat("int8", 32),
    "ct-int4": WeightFormat("int4", 32),
    "ct-int4-asym": WeightFormat("int4", 32, zero=True),
    "ct-fp8": WeightFormat("fp8", 64),
    "ct-fp8-block": WeightFormat("fp8", 32),
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_format_says(tmp_path: Path, form: str) -> None:
    wanted = write_packed(tmp_path / "model", form)
    checkpoint = zoo.resolve(str(tmp_path / "model"))
    quantized, dense = checkpoint.quantized(), checkpoint.tensors()
    assert set(quantized) == set(wanted)
    assert set(dense) == set(tiny_weights())
    assert "quantization_config" not in checkpoint.config
    for name, weight in wanted.items():
        assert np.array_equal(read_tensor(dense[name]), weight), name
        loaded = quantized[name].load()
        assert np.array_equal(loaded.dequantize(), weight), name
        assert loaded.format == quantized[name].format
    found = quantized["model.layers.0.self_attn.q_proj.weight"].format
    assert (found.kind, found.group, found.zero) == (FORMS[form].kind, FORMS[form].group, FORMS[form].zero)
    assert (found.order is not None) == (form == "gptq-act-order")
    for name, weight in tiny_weights().items():
        if name not in wanted:
            assert np.array_equal(read_tensor(dense[name]), weight), name


def test_a_second_resolve_unpacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path / "model", "awq")
    first = zoo.resolve(str(tmp_path / "model"))
    monkeypatch.setattr("zoo.formats.unpack_folder.unpack_folder", None)
    assert zoo.resolve(str(tmp_path / "model")).folder == first.folder
    assert (first.name, first.source) == ("model", "folder")


def test_dense_weights_keep_their_dtype(tmp_path: Path) -> None:
    write_packed(tmp_path / "model", "gptq")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    save_file(tensors, path)
    refs = zoo.resolve(str(tmp_path / "model")).tensors()
    assert refs["model.norm.weight"].dtype == "BF16"
    assert np.array_equal(read_tensor(refs["model.norm.weight"]), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq.*in 3 bits; 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, 4 bits, gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors, marlin-24"),
        ({"quant_method": "bitsandbytes"}, r"already quantized \(bitsandbytes\); gptq, awq and compressed-tensors"),
        ([1], "already quantized"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, change: object, message: str) -> None:
    write_packed(tmp_path / "model", "gptq")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": change}))
    with pytest.raises(ZooError, match=message):
        zoo.resolve(str(tmp_path / "model"))


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_missing_or_misshapen_part_is_named(tmp_path: Path, part: str, home: Path) -> None:
    write_packed(tmp_path / "model", "gptq")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    broken = "model.layers.1.mlp.up_proj"
    del tensors[f"{broken}.{part}"]
    save_file(tensors, path)
    with pytest.raises(ZooError, match=rf"{broken} is damaged"):
        zoo.resolve(str(tmp_path / "model"))
    tensors[f"{broken}.{part}"] = np.zeros((1, 3), np.int32 if part == "qzeros" else np.float16)
    save_file(tensors, path)
    with pytest.raises(ZooError, match=rf"{broken} is damaged"):
        zoo.resolve(str(tmp_path / "model"))
    assert not list((home / "models").glob("*unpacked*"))
