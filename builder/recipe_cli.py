"""`plancast recipes`: what ships, and what one says once resolved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.errors import RecipeError

if TYPE_CHECKING:
    from builder.recipe import Recipe


def register(app: typer.Typer) -> None:
    app.command("recipes")(recipes)


def recipes(
    recipe: Annotated[str | None, typer.Argument(help="A shipped recipe's name or a file. Left out: list all.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in `plancast build`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes, or print one resolved: base, overrides and defaults written out."""
    if recipe is None:
        if overrides:
            raise RecipeError("--set needs the name of a recipe: plancast recipes NAME --set KEY=VALUE")
        _print_list(as_json)
    else:
        _print_recipe(recipe, overrides or [], as_json)


def _print_list(as_json: bool) -> None:
    from builder.recipe import recipe_to_dict
    from builder.recipe_load import shipped, summarize

    summaries = [summarize(name) for name in shipped()]
    if as_json:
        entries = [
            {
                "name": summary.name,
                "about": summary.about,
                "recipe": recipe_to_dict(summary.recipe) if summary.recipe else None,
                "error": summary.error,
            }
            for summary in summaries
        ]
        print(json.dumps(entries, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for summary in summaries:
        table.add_row(summary.name, summary.about)
        table.add_row("", _in_short(summary.recipe), style="dim")
    Console().print(table)
    print("\n`plancast recipes NAME` prints one, `plancast build NAME` builds it; copy one to make your own.")


def _in_short(recipe: Recipe | None) -> str:
    if recipe is None:
        return "a template: its model is set on the command line"
    kv = recipe.kv.key if recipe.kv.key == recipe.kv.value else f"{recipe.kv.key}/{recipe.kv.value}"
    return (
        f"{recipe.model}, {recipe.backend.name}: {recipe.weights.dtype} weights, {recipe.backend.compute} compute, "
        f"{kv} KV, {recipe.limits.max_context_len} tokens"
    )


def _print_recipe(recipe: str, overrides: list[str], as_json: bool) -> None:
    from builder.recipe import load_recipe, recipe_hash, recipe_to_dict

    resolved = load_recipe(recipe, overrides)
    value: dict[str, Any] = recipe_to_dict(resolved)
    if as_json:
        print(json.dumps({"hash": recipe_hash(resolved), "recipe": value}, indent=2))
        return
    import yaml

    print(f"# hash {recipe_hash(resolved)}")
    print(yaml.safe_dump(value, sort_keys=False, default_flow_style=False), end="")
