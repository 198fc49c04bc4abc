"""`build` end to end on a tiny random Llama: what it writes, what it keeps, and what it leaves when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from openvino_engine import skip_unless_computed
from tiny_build import plancast_home, tiny_recipe, tiny_workshop
from tiny_hf import CONTEXT, write_tiny_gguf, write_tiny_hf

from builder import build as build_module
from builder import stages
from builder.build import build, plan_build, run_build
from builder.progress import BuildProgress
from plugins.paged_attention.op import VERSION
from runtime.artifact import Artifact
from runtime.errors import ArtifactError, BuildError, PlancastError
from runtime.executors import open_executor


@pytest.fixture(scope="module")
def workshop() -> Path:
    return tiny_workshop()


@pytest.fixture
def home(workshop: Path) -> Iterator[Path]:
    """The cache that holds the tiny engine."""
    with plancast_home(workshop / "home") as folder:
        yield folder


@pytest.fixture
def empty_home(tmp_path: Path) -> Iterator[Path]:
    with plancast_home(tmp_path / "home") as folder:
        yield folder


def entries(folder: Path) -> list[str]:
    """Everything in `folder` but locks."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock")) if folder.exists() else []


def test_the_artifact_is_whole_and_equal_to_the_original(workshop: Path) -> None:
    artifact = Artifact.open(workshop / "artifact", verify="full")
    manifest = artifact.manifest
    assert manifest.name == "tiny"
    assert manifest.model.num_layers == 2
    assert manifest.model.context_length == CONTEXT
    assert manifest.limits.max_num_batched_tokens == 64
    assert manifest.plugins["PagedAttention"] == VERSION
    assert manifest.operators["PagedAttention"] == manifest.operators_traced["PagedAttention"] == 2
    assert sum(manifest.operators.values()) < sum(manifest.operators_traced.values())
    assert manifest.kv.block_size == 32
    assert manifest.build["max_memory"] > 0
    assert manifest.build["seconds"].keys() >= {"pull", "trace", "compile", "parity"}
    parity = manifest.parity
    assert parity is not None
    assert (parity.greedy_matching_prompts, parity.greedy_prompts, parity.greedy_tokens) == (4, 4, 32)
    assert parity.mean_kl < 1e-6
    assert parity.top1_agreement > 0.999
    assert parity.perplexity == pytest.approx(parity.reference_perplexity, rel=1e-3)


def test_it_carries_all_that_serving_needs_and_the_licence(workshop: Path) -> None:
    artifact = Artifact.open(workshop / "artifact")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert artifact.file(name).read_bytes() == (workshop / "model" / name).read_bytes()
    assert artifact.file("LICENSE.txt").read_text() == "Do what you like.\n"
    card = artifact.file("README.md").read_text()
    assert card.startswith("---\n")
    assert "# tiny" in card
    assert "4 of 4 prompts continue identically" in card
    assert not any(path.is_symlink() for path in artifact.path.iterdir())
    assert entries(artifact.path) == sorted(["manifest.json", *artifact.manifest.files])


def test_it_runs_with_the_model_and_the_cache_deleted(home: Path, workshop: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(workshop / "model", tmp_path / "model")
    recipe = tiny_recipe(tmp_path / "model")
    build(recipe, moved)
    shutil.rmtree(tmp_path / "model")
    executor = open_executor(Artifact.open(moved, verify="full"))
    try:
        assert executor.vocab_size == Artifact.open(moved).manifest.model.vocab_size
    finally:
        executor.close()


def test_a_second_build_takes_no_time_and_no_torch(home: Path, workshop: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    result = run_build(tiny_recipe(workshop / "model"), tmp_path / "again")
    assert result.cached
    assert time.monotonic() - started < 2
    first = Artifact.open(workshop / "artifact").manifest
    assert Artifact.open(tmp_path / "again", verify="full").manifest.files.keys() == first.files.keys()
    assert entries(tmp_path) == ["again"]


def test_what_is_there_already_is_not_touched(home: Path, workshop: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workshop / "model")
    build(recipe, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    build(recipe, tmp_path / "a")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before
    (tmp_path / "a" / "engine.xml").unlink()
    build(recipe, tmp_path / "a")
    Artifact.open(tmp_path / "a", verify="full")


def test_serving_defaults_and_name_change_without_a_compilation(home: Path, workshop: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workshop / "model", name="other", runtime={"scheduling_policy": "priority"})
    result = run_build(recipe, tmp_path / "other")
    assert result.cached
    manifest = Artifact.open(tmp_path / "other", verify="full").manifest
    assert manifest.name == "other"
    assert manifest.defaults.scheduling_policy == "priority"
    assert manifest.recipe["runtime"]["scheduling_policy"] == "priority"
    assert "# other" in (tmp_path / "other" / "README.md").read_text()


def test_another_recipe_s_artifact_is_replaced_only_by_force(
    home: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tiny_recipe(workshop / "model"), tmp_path / "a")
    other = tiny_recipe(workshop / "model", name="other")
    with pytest.raises(BuildError, match=r"holds the engine of another recipe, tiny; .*--force"):
        build(other, tmp_path / "a")
    assert Artifact.open(tmp_path / "a", verify="full").manifest.name == "tiny"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ArtifactError, match="is not an artifact"):
            build(other, tmp_path / "folder", force=force)
    assert entries(tmp_path / "folder") == ["thesis.txt"]


def test_a_broken_bound_fails_and_is_told_at_once_the_second_time(home: Path, workshop: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workshop / "model", quality={"max_kl": 1e-30})
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"mean KL is .* nats, over quality.max_kl 1e-30"):
        build(recipe, tmp_path / "a")
    assert time.monotonic() - started < 2  # the engine itself was built before
    assert entries(tmp_path) == []


def test_dry_run_writes_nothing(home: Path, workshop: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workshop / "model")
    assert build(recipe, tmp_path / "a", dry_run=True) == tmp_path / "a"
    plan = plan_build(recipe, tmp_path / "a")
    assert plan.cached
    assert plan.pulled
    assert plan_build(recipe, tmp_path / "a", force=True).cached is False
    new = plan_build(tiny_recipe(workshop / "model", weights={"dtype": "int8"}), tmp_path / "a")
    assert new.cached is False
    assert new.estimate.memory.keys() == {"trace", "compile", "parity"}
    assert entries(tmp_path) == []
    card = plan_build(tiny_recipe("qwen2.5-0.5b-instruct"), tmp_path / "a")
    assert (card.pulled, card.cached) == (False, None)
    with pytest.raises(BuildError, match="hub:owner/name is not pulled, so its size is unknown; plancast zoo pull"):
        plan_build(tiny_recipe("hub:owner/name"), tmp_path / "a")


def test_dry_run_of_a_gguf_converts_nothing(empty_home: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    recipe = tiny_recipe(f"gguf:{tmp_path / 'tiny.gguf'}", limits={"max_context_len": 128})
    plan = plan_build(recipe, tmp_path / "a")
    assert (plan.pulled, plan.cached) == (True, None)
    assert plan.estimate.peak_memory > 0
    assert not (empty_home / "models").exists()
    with pytest.raises(BuildError, match="was made for"):
        plan_build(tiny_recipe(recipe.model, limits={"max_context_len": 1 << 20}), tmp_path / "a")


def test_more_context_than_the_model_s_is_refused_before_anything_runs(empty_home: Path, workshop: Path) -> None:
    recipe = tiny_recipe(workshop / "model", limits={"max_context_len": CONTEXT + 1})
    with pytest.raises(
        BuildError, match=rf"is {CONTEXT + 1}, and model was made for {CONTEXT} tokens; lower it: --set"
    ):
        build(recipe, empty_home / "a")
    assert entries(empty_home / "builds") == []


def test_case_23_no_memory_is_refused_with_numbers(
    empty_home: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.memory import FreeMemory

    monkeypatch.setattr("builder.estimate.available_memory", lambda: FreeMemory(100 << 20, "control group"))
    with pytest.raises(BuildError, match=r"takes about .* of memory .*, and 100.0 MiB are free \(control group\)"):
        build(tiny_recipe(workshop / "model"), tmp_path / "a")
    assert entries(tmp_path) == ["home"]
    assert entries(empty_home / "builds") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("estimated", [True, False], ids=["refused by the estimate", "found full while writing"])
def test_case_23_full_disk(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimated: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        if not estimated:
            monkeypatch.setattr(build_module, "require", lambda *_, **__: None)
        with plancast_home(disk / "home"):
            with pytest.raises(PlancastError) as caught:
                build(tiny_recipe(workshop / "model", parity={"enabled": False}), tmp_path / "a")
            assert entries(disk / "home" / "builds") == []
        message = str(caught.value)
        assert "\n" not in message
        assert ("takes about" if estimated else "No space left on device") in message
        assert not (tmp_path / "a").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("stage", ["trace", "fuse", "quantize", "compile_engine"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), BuildError("an operator that nobody knows")])
def test_nothing_is_left_whatever_stage_fails(
    empty_home: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    for name in ("trace", "fuse", "quantize", "compile_engine"):
        monkeypatch.setattr(stages, name, fail if name == stage else lambda *_: FakeGraph())
    with pytest.raises(type(error)):
        build(tiny_recipe(workshop / "model"), tmp_path / "a")
    assert entries(empty_home / "builds") == []
    assert entries(tmp_path) == ["home"]


class FakeGraph:
    """Stands for the stages before the one that fails, whose values nobody looks into."""

    operators: ClassVar[dict[str, int]] = {}
    weights: ClassVar[dict[str, int]] = {}


def test_a_serving_install_is_told_what_to_add(
    empty_home: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_LIBRARIES", ("json", "a_library_that_is_not_there"))
    with pytest.raises(
        BuildError, match=r"building needs a_library_that_is_not_there, .*pip install 'plancast\[build\]'"
    ):
        build(tiny_recipe(workshop / "model"), tmp_path / "a")


def test_a_failed_comparison_leaves_nothing(
    empty_home: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builder.parity.ask_reference", fail)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_recipe(workshop / "model"), tmp_path / "a")
    assert entries(empty_home / "builds") == []
    assert entries(tmp_path) == ["home"]


def test_other_weights_are_another_engine(home: Path, workshop: Path, tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "model", seed=1)
    plan = plan_build(tiny_recipe(tmp_path / "model"), tmp_path / "a")
    assert plan.cached is False
    (tmp_path / "copy").mkdir()
    for path in (workshop / "model").iterdir():
        shutil.copyfile(path, tmp_path / "copy" / path.name)
    assert plan_build(tiny_recipe(tmp_path / "copy"), tmp_path / "a").cached is True


def test_a_damaged_cache_is_noticed_and_built_anew(workshop: Path, tmp_path: Path) -> None:
    key = Artifact.open(workshop / "artifact").manifest.build_key  # other tests build other engines in that home
    entry = tmp_path / "home" / "builds" / key
    shutil.copytree(workshop / "home" / "builds" / key, entry)
    with plancast_home(tmp_path / "home"):
        data = bytearray((entry / "engine.bin").read_bytes())
        data[100] ^= 1
        (entry / "engine.bin").write_bytes(data)
        progress = BuildProgress()
        recipe = tiny_recipe(workshop / "model")
        result = run_build(recipe, tmp_path / "a", progress=progress)
    assert not result.cached
    assert any("damaged" in note for note in progress.notes)
    Artifact.open(tmp_path / "a", verify="full")


def test_sharded_weights_build(empty_home: Path, tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "model", shards=3)
    build(tiny_recipe(tmp_path / "model"), tmp_path / "a")
    parity = Artifact.open(tmp_path / "a").manifest.parity
    assert parity is not None
    assert parity.greedy_matching_prompts == 4


@pytest.mark.parametrize(
    ("weights", "compute", "kv"), [("int8", "f32", "f32"), ("bf16", "bf16", "bf16"), ("int8", "bf16", "int8")]
)
def test_every_precision_stays_near_the_original(
    empty_home: Path, workshop: Path, tmp_path: Path, weights: str, compute: str, kv: str
) -> None:
    skip_unless_computed(compute)
    recipe = tiny_recipe(
        workshop / "model",
        weights={"dtype": weights},
        backend={"compute": compute},
        kv={"key": kv, "value": kv},
    )
    build(recipe, tmp_path / "a")
    manifest = Artifact.open(tmp_path / "a", verify="full").manifest
    assert manifest.weights_bytes[weights] > sum(manifest.weights_bytes.values()) / 2
    assert {layer.key_dtype for layer in manifest.kv.layers} == {kv}
    assert manifest.parity is not None
    # Random weights make sharp distributions, so that small errors show; a wrong engine would be at 10 or more.
    assert manifest.parity.mean_kl < 3
