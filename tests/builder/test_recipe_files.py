"""Recipes that extend others, overrides from the command line, and where a model's path is relative to."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.recipe import load_recipe
from runtime.errors import RecipeError


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_extends_merges_deeply(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="name: the-base\nmodel: /m\nweights: {dtype: int8, skip: [a, b]}\nlimits: {max_num_seqs: 7}\n",
        middle="extends: base\nlimits: {max_context_len: 512}\nweights: {skip: [c]}\n",
        top="extends: middle\nweights: int8\nlimits:\n  max_context_len: 256\n",
    )
    recipe = load_recipe(str(tmp_path / "top.yaml"))
    assert recipe.name == "top", "a name belongs to one file"
    assert recipe.weights.skip == ("c",), "lists are replaced, and a short form keeps the other keys"
    assert (recipe.limits.max_num_seqs, recipe.limits.max_context_len) == (7, 256)


def test_extends_a_shipped_recipe_even_under_its_name(tmp_path: Path) -> None:
    write(tmp_path, **{"smollm2-135m-cpu": "extends: smollm2-135m-cpu\nlimits: {max_num_seqs: 3}\n"})
    recipe = load_recipe(str(tmp_path / "smollm2-135m-cpu.yaml"))
    assert (recipe.limits.max_num_seqs, recipe.weights.dtype) == (3, "int8")


def test_a_file_beside_goes_before_a_shipped_recipe(tmp_path: Path) -> None:
    write(tmp_path, local="model: /beside\n", mine="extends: local\n")
    assert load_recipe(str(tmp_path / "mine.yaml")).model == "/beside"


def test_cycles(tmp_path: Path) -> None:
    write(tmp_path, a="extends: b\nmodel: /m", b="extends: c", c="extends: a")
    with pytest.raises(RecipeError, match=r"extends itself: a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml"):
        load_recipe(str(tmp_path / "a.yaml"))
    write(tmp_path, d="extends: ./d.yaml")
    with pytest.raises(RecipeError, match=r"no recipe file|extends itself"):
        load_recipe(str(tmp_path / "d.yaml"))


def test_a_problem_names_the_file_that_has_it(tmp_path: Path) -> None:
    write(tmp_path, base="model: /m\n\nweights: int9\n", top="extends: base\nweights: int8\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "top.yaml"))
    assert str(caught.value).startswith(f"{tmp_path / 'base.yaml'}:3: weights.dtype: 'int9'")


def test_paths_are_shown_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", mine="modle: x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"^recipes/mine\.yaml:1: "):
        load_recipe("recipes/mine.yaml")


def test_overrides(tmp_path: Path) -> None:
    recipe = load_recipe(
        "smollm2-135m-cpu",
        ["backend.compute=f32", "kv=f32", "weights=f32", "runtime.kv_cache_memory=2GiB", "runtime.ttft_slo=0.5",
         "quality.max_kl=1e-3", "limits.max_num_seqs=4", "backend.num_threads=null", "parity.enabled=true",
         "limits.max_num_seqs=5"],
    )  # fmt: skip
    assert (recipe.backend.compute, recipe.kv.value, recipe.weights.dtype) == ("f32", "f32", "f32")
    assert recipe.runtime.kv_cache_memory == 2 << 30
    assert recipe.limits.max_num_seqs == 5, "the last one counts"
    assert load_recipe("local", ["model=/m", "weights={dtype: int8, skip: [lm_head]}"]).weights.skip == ("lm_head",)


@pytest.mark.parametrize("model", ["123", "true", "null", "/a: b", "{x}", "hub:owner/name@main", "/m # not a comment"])
def test_a_model_is_text_whatever_it_looks_like(model: str) -> None:
    assert load_recipe("local", [f"model={model}"]).model == model


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend.compute", "KEY=VALUE is expected"),
        ("=x", "KEY=VALUE is expected"),
        ("backend..compute=x", "KEY=VALUE is expected"),
        ("", "KEY=VALUE is expected"),
        ("backend.compute=fp16", "backend.compute: 'fp16' is not allowed.*did you mean 'f16'"),
        ("backend.compte=f32", "unknown key 'compte' in 'backend'.*did you mean 'compute'"),
        ("compute=f32", "unknown key 'compute'.*did you mean 'backend.compute'"),
        ("backnd.compute=f32", r"unknown key 'backnd\.compute'; did you mean 'backend.compute'"),
        ("backend.compute.x=f32", r"unknown key 'backend\.compute\.x'"),
        ("extends=local", "a recipe's base cannot be overridden"),
        ("backend=openvino", "backend: 'openvino' is text; a mapping is expected"),
        ("limits.max_num_seqs=[", "not valid YAML"),
        ("limits.max_num_seqs=", "null is null|is null; an integer is expected"),
        ("model=", "model: must not be empty"),
        ("name=a/b", "name: 'a/b' is not allowed"),
        ("weights={dtype: int8, dtype: f32}", "given twice"),
    ],
)
def test_bad_overrides_name_themselves(override: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe("smollm2-135m-cpu", [override])
    assert str(caught.value).startswith(f"--set {override}: ")


def test_an_overridden_mistake_is_still_a_mistake() -> None:
    with pytest.raises(RecipeError, match="backend: 'x' is text"):
        load_recipe("smollm2-135m-cpu", ["backend=x", "backend.num_threads=2"])


def test_a_relative_model_is_relative_to_who_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "models" / "m").mkdir(parents=True)
    write(tmp_path / "recipes", a="model: ../models/m", b="model: gguf:m.gguf", c="extends: a")
    monkeypatch.chdir(tmp_path / "models")
    assert load_recipe(str(tmp_path / "recipes" / "a.yaml")).model == str(tmp_path / "models" / "m")
    assert load_recipe(str(tmp_path / "recipes" / "b.yaml")).model == f"gguf:{tmp_path / 'recipes' / 'm.gguf'}"
    assert load_recipe("../recipes/c.yaml").model == str(tmp_path / "models" / "m")
    assert load_recipe("local", ["model=./m"]).model == str(tmp_path / "models" / "m")
    assert load_recipe("local", ["model=~/m"]).model == str(Path.home() / "m")
    assert load_recipe("local", ["model=smollm2-135m-instruct"]).model == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m-cp", "no recipe 'smollm2-135m-cp'; shipped: .*did you mean 'smollm2-135m-cpu'"),
        ("SmolLM2-135M-CPU", "did you mean 'smollm2-135m-cpu'"),
        ("./nowhere.yaml", "no recipe file at nowhere.yaml"),
        ("nowhere/x", "no recipe file at nowhere/x.yaml"),
        ("", "no recipe ''"),
        ("x" * 1000, "no recipe 'xxx"),
        ("\0", "no recipe"),
        (".", "no recipe '.'"),
        ("/", "no recipe file"),
    ],
)
def test_no_such_recipe(name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(name)


def test_an_unreadable_recipe(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(RecipeError, match="no recipe file at"):
        load_recipe(str(tmp_path / "folder.yaml"))
