"""Case 23: a build that cannot fit is refused before it starts, with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import estimate as estimate_module
from builder.estimate import GIB, MIB, ModelSize, estimate, require, require_disk, same_disk
from builder.recipe import Recipe, recipe_from_dict, recipe_to_dict
from runtime.errors import BuildError
from runtime.memory import FreeMemory

SMALL = ModelSize(parameters=134_515_008, layers=30, vocab_size=49_152, hidden_size=576)
MEDIUM = ModelSize(parameters=401_910_656, layers=24, vocab_size=49_152, hidden_size=896)
LARGE = ModelSize(parameters=70_553_706_496, layers=80, vocab_size=128_256, hidden_size=8192)
RECIPE = Recipe(name="tiny", model="./tiny")


def changed(**sections: dict[str, object]) -> Recipe:
    value = recipe_to_dict(RECIPE)
    for name, section in sections.items():
        value[name] |= section
    return recipe_from_dict(value)


def test_more_of_anything_costs_no_less() -> None:
    base = estimate(RECIPE, SMALL)
    assert 1 * GIB < base.peak_memory < 4 * GIB
    larger = estimate(RECIPE, LARGE)
    assert larger.peak_memory > 4 * LARGE.parameters  # the comparison holds the model in f32
    assert larger.total_disk > 4 * LARGE.parameters
    int8 = estimate(changed(weights={"dtype": "int8"}), SMALL)
    assert int8.disk["engine"] == base.disk["engine"] // 4
    assert int8.memory["compile"] < base.memory["compile"]
    unchecked = estimate(changed(parity={"enabled": False}), LARGE)
    assert unchecked.peak_memory <= larger.peak_memory
    assert unchecked.total_disk < larger.total_disk
    assert "parity" not in unchecked.seconds


@pytest.mark.parametrize(
    ("weights", "compute", "size", "measured"),
    [
        ("f32", "f32", SMALL, 2.0),
        ("int8", "bf16", SMALL, 1.5),
        ("f32", "f32", MEDIUM, 4.5),
        ("bf16", "bf16", MEDIUM, 2.9),
        ("int8", "bf16", MEDIUM, 2.3),
    ],
)
def test_compilation_is_estimated_near_what_was_measured(
    weights: str, compute: str, size: ModelSize, measured: float
) -> None:
    """`measured`: resident GiB, of which some are mapped files that the system may drop."""
    kv = {"key": compute if compute == "f32" else "int8", "value": compute if compute == "f32" else "int8"}
    recipe = changed(weights={"dtype": weights}, backend={"compute": compute}, kv=kv)
    assert 0.7 < estimate(recipe, size).memory["compile"] / GIB / measured < 1.3


def test_memory_that_is_not_there_is_refused_with_the_numbers(tmp_path: Path) -> None:
    cost = estimate(RECIPE, LARGE)
    with pytest.raises(BuildError, match=r"about \d+\.\d GiB of memory \(in \w+\), and 2\.0 GiB are free \(mach"):
        require(cost, cache=tmp_path, free=FreeMemory(2 * GIB, "machine"))
    assert cost.peak_stage in ("parity", "compile")
    parity_bound = estimate(changed(weights={"dtype": "int8"}, backend={"compute": "bf16"}), LARGE)
    assert parity_bound.peak_stage == "parity"
    with pytest.raises(BuildError, match=r"--set parity.enabled=false"):
        require(parity_bound, cache=tmp_path, free=FreeMemory(GIB, "control group"))


def test_what_fits_passes(tmp_path: Path) -> None:
    cost = estimate(RECIPE, SMALL)
    require(cost, cache=tmp_path / "not" / "yet", free=FreeMemory(cost.peak_memory, "machine"))
    with pytest.raises(BuildError):
        require(cost, cache=tmp_path, free=FreeMemory(cost.peak_memory - 1, "machine"))


def test_disk_that_is_not_there_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=rf"the build takes about 1024\.0 TiB of disk in {tmp_path}/new, where"):
        require_disk(tmp_path / "new", 1 << 50, "the build")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(estimate_module, "_DISK_MARGIN", 1 << 60)
    with pytest.raises(BuildError, match="must stay free"):
        require_disk(tmp_path, MIB, "the build")


def test_same_disk(tmp_path: Path) -> None:
    assert same_disk(tmp_path / "a" / "b", tmp_path / "c")
    assert not same_disk(Path("/proc/a"), tmp_path)
