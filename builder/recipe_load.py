"""Recipe files: finding them, `extends`, `--set` overrides, and the model's path."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from builder.recipe import Recipe
from builder.recipe_check import impossible
from builder.recipe_decode import decode, field_type, key_paths, layer_problems, suggestion, unknown_key
from builder.recipe_yaml import Node, display, parse_yaml, read_yaml
from runtime.errors import RecipeError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
# A bare word for these sections is short for these keys of theirs.
_SHORT_FORMS = {"weights": ("dtype",), "kv": ("key", "value"), "speculation": ("method",)}


def shipped() -> list[str]:
    """Names of the recipes that come with plancast."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(name_or_path: str, overrides: list[str]) -> Recipe:
    """See `builder.recipe.load_recipe`."""
    path = find(name_or_path)
    root = _read_extended(path, ())
    layers = [_parse_override(override) for override in overrides]
    _refuse([line for layer in layers for line in layer_problems(layer)])
    for layer in layers:
        root = _merge(root, layer)
    root.value.setdefault("name", Node(path.stem, display(path), path.stem))
    recipe = decode(root)
    _refuse([f"{_where(root, p.path)}: {'.'.join(p.path)}: {p.text}" for p in impossible(recipe)])
    return recipe


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RecipeError("\n".join(problems))


def find(name_or_path: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a path, a file beside another recipe's file, or the name of a shipped one."""
    given = Path(name_or_path).expanduser()
    folder = beside.parent if beside else Path()
    if given.suffix in _SUFFIXES or os.sep in name_or_path:
        candidates = [folder / given] if given.suffix in _SUFFIXES else [folder / f"{given}{s}" for s in _SUFFIXES]
    else:
        candidates = [folder / f"{given}{suffix}" for suffix in _SUFFIXES] if beside else []
        candidates.append(RECIPES / f"{given}.yaml")
        # A copy of a shipped recipe may extend it under the same name.
        candidates = [candidate for candidate in candidates if not beside or candidate.resolve() != beside.resolve()]
    for candidate in candidates:
        if os.path.isfile(candidate):  # pathlib's raises where the name is too long
            return candidate
    if os.sep in name_or_path or given.suffix in _SUFFIXES:
        raise RecipeError(f"no recipe file at {candidates[0]}")
    names = shipped()
    raise RecipeError(
        f"no recipe {name_or_path!r}; shipped: {', '.join(names)}{suggestion(name_or_path, names)} "
        "(or give the path of a .yaml file)"
    )


def _read_extended(path: Path, chain: tuple[Path, ...]) -> Node:
    """The file's content over what it extends."""
    path_key = path.resolve()
    if path_key in chain:
        names = " -> ".join(link.name for link in (*chain[chain.index(path_key) :], path_key))
        raise RecipeError(f"{display(path)}: extends itself: {names}")
    node = _expand(read_yaml(path))
    node = _anchor_model(node, path.parent)
    parent = node.value.pop("extends", None)
    _refuse(layer_problems(node))
    if parent is None:
        return node
    if not isinstance(parent.value, str):
        raise RecipeError(f"{parent.where}: extends: the name or path of one recipe is expected")
    try:
        base_path = find(parent.value, beside=path)
    except RecipeError as error:
        raise RecipeError(f"{parent.where}: extends: {error}") from None
    base = _read_extended(base_path, (*chain, path_key))
    base.value.pop("name", None)  # a name belongs to one file
    return _merge(base, node)


def _expand(node: Node) -> Node:
    """Write out the short forms, so that `weights: int8` merges with a base's `weights: {skip: [...]}`."""
    for section, keys in _SHORT_FORMS.items():
        entry = node.value.get(section)
        if entry is not None and isinstance(entry.value, str):
            node.value[section] = replace(entry, value=dict.fromkeys(keys, entry))
    return node


def _merge(base: Node, over: Node) -> Node:
    """Mappings merge key by key; anything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = _merge(merged[key], node) if key in merged else node
    return replace(base, value=merged)


def _parse_override(override: str) -> Node:
    """`a.b=value` as a mapping that holds just that."""
    where = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise RecipeError(f"{where}: KEY=VALUE is expected, such as --set backend.compute=bf16")
    if path == ("extends",):
        raise RecipeError(f"{where}: a recipe's base cannot be overridden; write a file that extends another")
    declared = field_type(path)
    if declared is None:
        siblings = [other[-1] for other in key_paths() if other[:-1] == path[:-1]]
        if siblings:
            raise RecipeError(unknown_key(path, where, siblings))
        known = [".".join(other) for other in key_paths()]
        raise RecipeError(f"{where}: unknown key {dotted!r}{suggestion(dotted, known)}")
    if path in (("model",), ("name",)):  # text whatever it looks like
        node = Node(text, where, text)
    else:
        node = parse_yaml(text, where, numbered=False)
    for part in reversed(path):
        node = Node({part: node}, where)
    return _anchor_model(_expand(node), Path())


def _anchor_model(node: Node, folder: Path) -> Node:
    """Make the model's path absolute: relative to the file that says it, or to the working folder."""
    entry = node.value.get("model")
    if entry is not None and isinstance(entry.value, str):
        prefix, rest = ("gguf:", entry.value[5:]) if entry.value.startswith("gguf:") else ("", entry.value)
        is_folder = os.sep in rest and ":" not in rest and (folder / rest).is_dir()
        if prefix or is_folder or rest.startswith((".", "~", os.sep)):
            path = os.path.abspath(folder / Path(rest).expanduser())
            node.value["model"] = replace(entry, value=f"{prefix}{path}")
    return _anchor_text(node, folder)


def _anchor_text(node: Node, folder: Path) -> Node:
    """The same for the calibration text's path."""
    calibration = node
    for key in ("weights", "calibration"):
        calibration = calibration.value.get(key) if isinstance(calibration.value, dict) else None
        if calibration is None:
            return node
    entry = calibration.value.get("text") if isinstance(calibration.value, dict) else None
    if entry is not None and isinstance(entry.value, str):
        path = os.path.abspath(folder / Path(entry.value).expanduser())
        calibration.value["text"] = replace(entry, value=path)
    return node


def _where(root: Node, path: tuple[str, ...]) -> str:
    """Where the key stands, or the nearest thing above it that is written down."""
    node = root
    for part in path:
        if not isinstance(node.value, dict) or part not in node.value:
            break
        node = node.value[part]
    return node.where


@dataclass(frozen=True, slots=True)
class Summary:
    """What `plancast recipes` says of one file."""

    name: str
    about: str
    model: str | None
    recipe: Recipe | None
    error: str | None


def summarize(name: str) -> Summary:
    """The first comment line of a shipped recipe, and the recipe itself where it is complete."""
    path = find(name)
    first = path.read_text(encoding="utf-8").splitlines()[:1]
    about = first[0].lstrip("# ").strip() if first and first[0].startswith("#") else ""
    try:
        recipe = load(name, [])
        return Summary(name, about, recipe.model, recipe, None)
    except RecipeError as error:
        return Summary(name, about, None, None, str(error))
