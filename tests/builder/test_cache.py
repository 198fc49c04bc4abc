"""The build cache: found only where whole, bounded, and keyed by everything that changes an engine."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from tiny_artifact import FILES, write_tiny_artifact

from builder import cache as cache_module
from builder.cache import BuildCache, build_key, place
from builder.progress import BuildProgress
from builder.recipe import Recipe, recipe_from_dict, recipe_to_dict
from runtime.artifact import Artifact
from runtime.errors import BuildError

RECIPE = Recipe(name="tiny", model="./tiny")
CONTENT = {"config.json": "1" * 64, "model.safetensors": "2" * 64}


def changed(**sections: object) -> Recipe:
    value = recipe_to_dict(RECIPE)
    for name, section in sections.items():
        value[name] = {**value[name], **section} if isinstance(section, dict) else section
    return recipe_from_dict(value)


@pytest.fixture
def quiet() -> BuildProgress:
    return BuildProgress()


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "builds", max_bytes=1 << 30)


def fill(cache: BuildCache, key: str) -> Path:
    manifest = Artifact.open(write_tiny_artifact(cache.entry(key))).manifest
    cache.record(key, manifest)
    return cache.entry(key)


def test_key_is_stable_and_names_what_changes_the_engine() -> None:
    key = build_key(RECIPE, CONTENT)
    assert key == build_key(changed(), dict(reversed(CONTENT.items())))
    different = [
        changed(backend={"compute": "bf16"}),
        changed(backend={"blob": False}),
        changed(weights={"dtype": "int8"}),
        changed(weights={"skip": ["lm_head*"]}),
        changed(kv={"key": "int8"}),
        changed(limits={"max_context_len": 128}),
        changed(parity={"new_tokens": 7}),
        changed(trust_remote_code=True),
    ]
    keys = [build_key(recipe, CONTENT) for recipe in different]
    keys.append(build_key(RECIPE, {**CONTENT, "config.json": "3" * 64}))
    assert len({key, *keys}) == len(keys) + 1


def test_key_leaves_out_what_an_artifact_gets_anew() -> None:
    key = build_key(RECIPE, CONTENT)
    for recipe in (
        changed(name="other"),
        changed(model="./elsewhere"),
        changed(runtime={"scheduling_policy": "priority"}),
        changed(quality={"max_kl": 0.1}),
    ):
        assert build_key(recipe, CONTENT) == key


def test_key_changes_with_libraries_sources_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build_key(RECIPE, CONTENT)
    for name, value in (
        ("_version", lambda name: "9"),
        ("_sources_hash", lambda kernels: "9"),
        ("_native", lambda: "9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, name, value)
            assert build_key(RECIPE, CONTENT) != key, name
    without = changed(backend={"blob": False, "linear": "openvino", "attention": "openvino"})
    portable = build_key(without, CONTENT)
    monkeypatch.setattr(cache_module, "_native", lambda: "9")
    assert build_key(without, CONTENT) == portable


def test_every_section_of_a_recipe_is_in_the_key_or_left_out_on_purpose() -> None:
    assert set(cache_module._NOT_IN_KEY) < set(Recipe.__struct_fields__)
    assert set(cache_module._NOT_IN_KEY) == {"name", "model", "draft_head", "runtime", "speculation", "quality"}


def test_finds_what_is_whole(cache: BuildCache, quiet: BuildProgress) -> None:
    assert cache.find("k", quiet) is None
    fill(cache, "k")
    manifest = cache.find("k", quiet)
    assert manifest is not None
    assert set(manifest.files) == set(FILES)
    assert quiet.notes == []


def test_an_entry_edited_in_place_is_dropped(cache: BuildCache, quiet: BuildProgress) -> None:
    entry = fill(cache, "k")
    data = bytearray((entry / "engine.bin").read_bytes())
    data[7] ^= 1
    (entry / "engine.bin").write_bytes(data)
    assert cache.find("k", quiet) is None
    assert not entry.exists()
    assert "damaged" in quiet.notes[0]
    assert "engine.bin" in quiet.notes[0]


def test_a_touched_but_equal_entry_is_kept_and_hashed_once(
    cache: BuildCache, quiet: BuildProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = fill(cache, "k")
    (entry / "engine.bin").write_bytes(FILES["engine.bin"])
    os.utime(entry / "engine.bin", (1, 1))
    assert cache.find("k", quiet) is not None

    def hash_again(*_: object) -> str:
        raise AssertionError("hashed a file that nobody touched")

    monkeypatch.setattr("runtime.artifact.sha256_of", hash_again)
    assert cache.find("k", quiet) is not None


@pytest.mark.parametrize("damage", ["unlink", "truncate", "manifest", "index"])
def test_damage_is_found(cache: BuildCache, quiet: BuildProgress, damage: str) -> None:
    entry = fill(cache, "k")
    if damage == "unlink":
        (entry / "engine.xml").unlink()
    elif damage == "truncate":
        (entry / "engine.xml").write_bytes(b"")
    elif damage == "manifest":
        (entry / "manifest.json").write_bytes(b"{}")
    else:
        (cache.root / "k.json").write_bytes(b"[")  # only a hint: the files are hashed, and whole
    assert (cache.find("k", quiet) is not None) == (damage == "index")


def test_the_least_recently_used_goes_first(cache: BuildCache, quiet: BuildProgress) -> None:
    size = sum(path.stat().st_size for path in fill(cache, "old").iterdir())
    fill(cache, "used")
    fill(cache, "new")
    for age, key in enumerate(("new", "used", "old")):
        stamp = time.time() - 100 * (age + 1)
        os.utime(cache.root / f"{key}.json", (stamp, stamp))
    assert cache.find("old", quiet) is not None  # now the most recent
    cache.max_bytes = 2 * size + size // 2
    cache.trim()
    assert cache.find("used", quiet) is None
    assert cache.find("old", quiet) is not None
    assert cache.find("new", quiet) is not None
    cache.max_bytes = 0
    cache.trim()
    assert [path.name for path in cache.root.iterdir() if not path.name.startswith(".")] == []


def test_size_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BuildCache(tmp_path).max_bytes == cache_module.DEFAULT_SIZE
    monkeypatch.setenv("PLANCAST_BUILD_CACHE_SIZE", "2GiB")
    assert BuildCache(tmp_path).max_bytes == 2 << 30
    monkeypatch.setenv("PLANCAST_BUILD_CACHE_SIZE", "0")
    assert BuildCache(tmp_path).max_bytes == 0
    monkeypatch.setenv("PLANCAST_BUILD_CACHE_SIZE", "plenty")
    with pytest.raises(BuildError, match="PLANCAST_BUILD_CACHE_SIZE: 'plenty' is not a size"):
        BuildCache(tmp_path)


def test_large_files_are_linked_and_small_ones_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    (tmp_path / "small").write_bytes(b"text")
    for name in ("large", "small"):
        place(tmp_path / name, tmp_path / f"{name}-placed")
        assert (tmp_path / f"{name}-placed").read_bytes() == (tmp_path / name).read_bytes()
    assert (tmp_path / "large-placed").samefile(tmp_path / "large")
    assert not (tmp_path / "small-placed").samefile(tmp_path / "small")

    def other_disk(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    place(tmp_path / "large", tmp_path / "copied")
    assert not (tmp_path / "copied").samefile(tmp_path / "large")
    assert (tmp_path / "copied").read_bytes() == bytes(1 << 20)


def _hold(root: Path, entered: multiprocessing.synchronize.Event, leave: multiprocessing.synchronize.Event) -> None:  # type: ignore[name-defined]
    with BuildCache(root).locked("k", BuildProgress()):
        entered.set()
        leave.wait(30)


def test_one_build_of_an_engine_at_a_time(cache: BuildCache, quiet: BuildProgress) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(cache.root, entered, leave))
    other.start()
    try:
        assert entered.wait(30)
        with cache.locked("another", quiet):
            assert quiet.notes == []
        leave.set()
        with cache.locked("k", quiet):  # the other may have left already, but it never holds the lock now
            other.join(30)
    finally:
        leave.set()
        other.join(30)
    assert other.exitcode == 0


def test_an_entry_survives_its_artifact_and_the_other_way_round(cache: BuildCache, quiet: BuildProgress) -> None:
    entry = fill(cache, "k")
    artifact = cache.root.parent / "artifact"
    artifact.mkdir()
    for name in FILES:
        place(entry / name, artifact / name)
    shutil.rmtree(artifact)
    assert cache.find("k", quiet) is not None


def test_manifests_carry_the_key(cache: BuildCache, quiet: BuildProgress) -> None:
    folder = write_tiny_artifact(cache.entry("k"), build_key="k")
    assert Artifact.open(folder).manifest.build_key == "k"
    assert msgspec.to_builtins(Artifact.open(folder).manifest)["build_key"] == "k"


def test_kernels_count_where_an_engine_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed Triton kernel makes another engine for RTX GPUs, which has it compiled, and the same one for a CPU."""
    rtx = changed(backend={"name": "tensorrt_rtx", "device": "CUDA", "compute": "f16"}, parity={"enabled": False})
    for name in ("builder", "zoo"):
        (tmp_path / name).mkdir()
    for name in ("plugins/norm/kernel.py", *cache_module._SOURCES[3:], *cache_module._SEGMENT_SOURCES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(cache_module, "_ROOT", tmp_path)
    before = build_key(RECIPE, CONTENT), build_key(rtx, CONTENT)
    (tmp_path / "plugins/norm/kernel.py").write_text("two")
    after = build_key(RECIPE, CONTENT), build_key(rtx, CONTENT)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert build_key(changed(backend={"name": "torch"}), CONTENT) != after[1]
