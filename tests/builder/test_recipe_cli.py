"""`plancast recipes`: the list, and one recipe resolved so that it can be copied."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from builder.recipe import load_recipe, recipe_hash
from builder.recipe_cli import register
from builder.recipe_load import shipped
from runtime.errors import RecipeError


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["recipes", *arguments])


def test_lists_what_ships() -> None:
    result = run()
    assert result.exit_code == 0
    for name in shipped():
        assert name in result.stdout
    entries = {entry["name"]: entry for entry in json.loads(run("--json").stdout)}
    assert set(entries) == set(shipped())
    assert entries["local"]["recipe"] is None
    assert all(entry["about"] for entry in entries.values())


def test_what_it_prints_is_a_recipe(tmp_path: Path) -> None:
    arguments = ("smollm2-135m-cpu", "--set", "limits.max_num_seqs=9")
    printed = run(*arguments).stdout
    (tmp_path / "copy.yaml").write_text(printed)
    recipe = load_recipe("smollm2-135m-cpu", ["limits.max_num_seqs=9"])
    assert load_recipe(str(tmp_path / "copy.yaml")) == recipe
    assert json.loads(run("smollm2-135m-cpu", "--set", "limits.max_num_seqs=9", "--json").stdout)[
        "hash"
    ] == recipe_hash(recipe)


def test_errors_are_ours() -> None:
    for arguments in (["nowhere"], ["local"], ["--set", "a=b"]):
        assert isinstance(run(*arguments).exception, RecipeError)
