"""Quantized formats: what each block means, bit for bit, against the reference that its own library gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_hf import write_tiny_gguf

import zoo
from runtime.errors import ZooError
from zoo.formats.gguf_blocks import block_format, read_blocks
from zoo.formats.side_file import NAME, SideFileWriter, read_side_file
from zoo.gguf_header import GGML_TYPES
from zoo.quantized import QuantizedWeight

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Bytes of a block that are f16 numbers, and so must not be random bits (infinities, NaN).
HALVES = {"Q6_K": (208,)} | dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,))
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Blocks of every bit pattern, their f16 factors finite."""
    rng = np.random.default_rng(7)
    elements, nbytes = next((e, b) for name, e, b in GGML_TYPES.values() if name == kind)
    blocks = rng.integers(0, 256, (rows * columns // elements, nbytes), np.uint8)
    for at in HALVES[kind]:
        numbers = (rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-6, 2, len(blocks))).astype("<f2")
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_dequantize_to_the_very_bits(kind: str) -> None:
    data = random_blocks(kind, 6, 512)
    weight = read_blocks(data.reshape(-1), kind, (6, 512))
    assert weight.format == block_format(kind)
    wanted = dequantize(data, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(weight.dequantize().view(np.int32) & 0x7FFFFFFF, wanted.view(np.int32) & 0x7FFFFFFF)
    np.testing.assert_array_equal(weight.dequantize(), wanted)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_matrix_of_a_gguf_file_keeps_its_integers(tmp_path: Path, kind: str) -> None:
    kept = write_tiny_gguf(tmp_path / "tiny.gguf", quantization=kind)
    quantized = zoo.resolve(f"gguf:{tmp_path / 'tiny.gguf'}").quantized()
    assert set(quantized) == {name for name, weight in kept.items() if weight.ndim == 2}
    for name, ref in quantized.items():
        weight = ref.load()
        assert weight.format == ref.format == block_format(kind)
        assert np.array_equal(weight.dequantize(), kept[name]), name


def test_a_dense_file_has_none(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", quantization="BF16")
    checkpoint = zoo.resolve(f"gguf:{tmp_path / 'tiny.gguf'}")
    assert checkpoint.quantized() == {}
    assert not (checkpoint.folder / NAME).exists()


def sample(kind: str, **extras: bool) -> QuantizedWeight:
    rng = np.random.default_rng(0)
    values = {
        "int4": (-8, 8, np.int8),
        "uint4": (0, 16, np.uint8),
        "int8": (-128, 128, np.int8),
        "fp8": (0, 126, np.uint8),
    }
    low, high, dtype = values[kind]
    return QuantizedWeight(
        kind,
        rng.integers(low, high, (4, 64)).astype(dtype),
        rng.random((4, 2)).astype(np.float32),
        zero=rng.integers(0, 8, (4, 2)).astype(dtype) if extras.get("zero") else None,
        minimum=rng.random((4, 2)).astype(np.float16).astype(np.float32) if extras.get("minimum") else None,
        order=rng.permutation(64).astype(np.int64) if extras.get("order") else None,
    )


def test_the_side_file_keeps_everything(tmp_path: Path) -> None:
    weights = {
        "a.weight": sample("int4"),
        "b.weight": sample("uint4", zero=True, order=True),
        "c.weight": sample("int8", minimum=True),
        "d.weight": sample("fp8"),
    }
    writer = SideFileWriter(tmp_path)
    for name, weight in weights.items():
        writer.add(name, weight)
    assert writer.close()
    found = read_side_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    for name, weight in weights.items():
        assert found[name].format == weight.format
        assert found[name].shape == weight.values.shape
        loaded = found[name].load()
        for part in ("values", "scale", "zero", "minimum", "order"):
            ours, theirs = getattr(loaded, part), getattr(weight, part)
            assert (ours is None and theirs is None) or np.array_equal(ours, theirs), (name, part)


def test_a_damaged_side_file_is_refused(tmp_path: Path) -> None:
    writer = SideFileWriter(tmp_path)
    writer.add("a.weight", sample("int4"))
    writer.close()
    data = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(data[:-5])
    with pytest.raises(ZooError, match="truncated"):
        read_side_file(tmp_path)
    (tmp_path / NAME).write_bytes(data.replace(b"int4", b"int5"))
    with pytest.raises(ZooError, match="corrupt"):
        read_side_file(tmp_path)


def test_gguf_quantizes_what_we_read() -> None:
    """The packers of the reference library, on a weight as a model has it."""
    weight = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        stored = quantize(weight, GGMLQuantizationType[kind])
        found = read_blocks(np.ascontiguousarray(stored).view(np.uint8).reshape(-1), kind, (4, 256)).dequantize()
        assert np.abs(found - weight).max() < 0.5
