"""Weights cut out of engine files and put back: what is found, and that every byte comes back or nothing does."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from builder.backends.stripped import NAME, arranged, filled, read_stripped, strip_file, write_stripped
from runtime.errors import ArtifactError

RNG = np.random.default_rng(3)
WEIGHTS = {
    "rows": ir.tensor(RNG.standard_normal((40, 24)).astype(np.float16)),
    "columns": ir.tensor(RNG.integers(-99, 99, (32, 48)).astype(np.int8)),
    "four": ir.tensor(RNG.integers(-8, 8, (32, 64)).astype(ml_dtypes.int4)),
    "merged": ir.tensor(RNG.standard_normal((60, 16)).astype(np.float16)),
    "absent": ir.tensor(RNG.standard_normal((30, 30)).astype(np.float32)),
    "norm": ir.tensor(RNG.standard_normal(64).astype(np.float16)),
}


def engine() -> bytes:
    merged = WEIGHTS["merged"].tobytes()
    parts = [
        arranged(WEIGHTS["four"], columns=True), merged[960:], WEIGHTS["rows"].tobytes(), WEIGHTS["norm"].tobytes(),
        arranged(WEIGHTS["columns"], columns=True), merged[:960],
    ]  # fmt: skip
    return b"".join(RNG.bytes(200) + part for part in parts) + RNG.bytes(10)


def test_every_byte_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "segment.engine"
    path.write_bytes(data := engine())
    stripped = strip_file(path, WEIGHTS)
    assert {hole.tensor for hole in stripped.holes} == set(WEIGHTS) - {"absent"}
    assert [hole.tensor for hole in stripped.holes].count("merged") == 2
    assert path.stat().st_size == 6 * 200 + 10
    write_stripped(tmp_path, {path.name: stripped})
    read = read_stripped(tmp_path / NAME, "")[path.name]
    assert filled(path, read, WEIGHTS.get, "") == data


def test_four_bit_elements_are_packed_as_they_lie_in_engines() -> None:
    four = ir.tensor(np.array([[1, -2], [3, -4]], ml_dtypes.int4))
    assert arranged(four, columns=True) == bytes([1 | 3 << 4, 14 | 12 << 4])
    assert arranged(four, columns=False) == bytes([1 | 14 << 4, 3 | 12 << 4])


def test_what_lies_there_twice_is_cut_once(tmp_path: Path) -> None:
    path = tmp_path / "segment.engine"
    raw = WEIGHTS["norm"].tobytes()
    path.write_bytes(data := RNG.bytes(70) + raw + raw + RNG.bytes(70))
    stripped = strip_file(path, {"a": WEIGHTS["norm"], "b": WEIGHTS["norm"], "c": WEIGHTS["norm"]})
    assert [(hole.tensor, hole.offset) for hole in stripped.holes] == [("a", 70), ("b", 70 + len(raw))]
    assert filled(path, stripped, lambda name: WEIGHTS["norm"], "") == data


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "segment.engine"
    path.write_bytes(engine())
    stripped = strip_file(path, WEIGHTS)
    other = WEIGHTS | {"rows": ir.tensor(np.zeros((40, 24), np.float16))}
    with pytest.raises(ArtifactError, match=r"segment\.engine: the weights are not those that were taken out; rebuild"):
        filled(path, stripped, other.get, "rebuild")
    with pytest.raises(ArtifactError, match="norm belongs into it, and the model has no such weight; rebuild"):
        filled(path, stripped, {**WEIGHTS, "norm": None}.get, "rebuild")
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_stripped(tmp_path / NAME, "rebuild")
    (tmp_path / NAME).write_text('{"files": {}, "format": 9}')
    with pytest.raises(ArtifactError, match="format 9, and this plancast reads format 1"):
        read_stripped(tmp_path / NAME, "rebuild")
