"""Located YAML -> `Recipe`: walks the structs of `builder/recipe.py` and lists every problem, each in one line."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from builder.recipe import Recipe
from builder.recipe_yaml import Node, describe
from runtime.errors import PlancastError, RecipeError
from runtime.memory import parse_size
from zoo.suggest import nearest

# Words that others use for ours, where the spelling alone would not lead there.
_SYNONYMS = {
    "float32": "f32", "fp32": "f32", "float": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
    "i8": "int8", "u8": "int8", "q8_0": "int8", "8bit": "int8", "w8a16": "int8",
    "i4": "int4", "u4": "int4", "q4_0": "int4", "4bit": "int4", "w4a16": "int4", "fp8_e4m3": "fp8", "float8": "fp8",
    "e4m3": "fp8", "imported": "checkpoint", "round": "rtn", "nearest": "rtn", "-1": "channel", "0": "channel",
}  # fmt: skip

KeyPath = tuple[str, ...]


def decode(root: Node) -> Recipe:
    """The recipe that `root` (a mapping) spells. Raises `RecipeError` with every problem found, one line each."""
    decoder = _Decoder()
    value = decoder.struct(root, Recipe, ())
    if decoder.problems:
        raise RecipeError("\n".join(decoder.problems))
    try:
        return msgspec.convert(value, Recipe)
    except PlancastError as error:  # keys of a section that contradict each other
        raise RecipeError(f"{root.where}: {error}") from None


def layer_problems(layer: Node) -> list[str]:
    """The problems of one file or override by itself: all but missing keys, which another layer may bring."""
    decoder = _Decoder(partial=True)
    decoder.struct(layer, Recipe, ())
    return decoder.problems


def field_type(path: KeyPath) -> Any:
    """The declared type of the key `path`, or None where a recipe has no such key."""
    kind: Any = Recipe
    for part in path:
        fields = _fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        if part not in fields:
            return None
        kind = fields[part]
    return kind


def suggestion(word: str, candidates: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no candidate is near."""
    synonym = _SYNONYMS.get(word.lower())
    return f"; did you mean {synonym!r}?" if synonym in candidates else nearest(word, candidates)


def key_paths(struct: type = Recipe, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of a recipe, sections included."""
    for name, kind in _fields(struct).items():
        yield (*prefix, name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from key_paths(kind, (*prefix, name))


@functools.cache
def _fields(struct: type) -> dict[str, Any]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def unknown_key(path: Sequence[str], where: str, fields: list[str]) -> str:
    """The line for a key that does not exist, with the keys that do and the nearest one, in whatever section."""
    hint = suggestion(path[-1], fields)
    elsewhere = [".".join(other) for other in key_paths() if other[-1] == path[-1] and other != tuple(path)]
    if elsewhere:
        hint = f"; did you mean {elsewhere[0]!r}?"
    section = f" in {'.'.join(path[:-1])!r}" if len(path) > 1 else ""
    return f"{where}: unknown key {path[-1]!r}{section}; allowed: {', '.join(fields)}{hint}"


class _Decoder:
    def __init__(self, *, partial: bool = False) -> None:
        self.partial = partial
        self.problems: list[str] = []

    def problem(self, node: Node, path: KeyPath, text: str) -> Any:
        self.problems.append(f"{node.where}: {'.'.join(path)}: {text}")
        return None

    def struct(self, node: Node, struct: type[msgspec.Struct], path: KeyPath) -> Any:
        fields = _fields(struct)
        if not isinstance(node.value, dict):
            return self.problem(
                node,
                path,
                f"{_show(node)} is {describe(node.value)}; a mapping is expected, keys: {', '.join(fields)}",
            )
        result = {}
        for key, child in node.value.items():
            if key not in fields:
                self.problems.append(unknown_key((*path, key), child.where, list(fields)))
            else:
                result[key] = self.value(child, fields[key], (*path, key))
        for field in msgspec.structs.fields(struct):
            if field.required and field.name not in node.value and not self.partial:
                self.problem(node, (*path, field.name), f"missing; set it, or pass --set {field.name}=VALUE")
        return result

    def value(self, node: Node, kind: Any, path: KeyPath, *, optional: bool = False) -> Any:
        origin, args = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            if node.value is None:
                return None
            (kind,) = [arg for arg in args if arg is not type(None)]
            return self.value(node, kind, path, optional=True)
        if origin is Annotated:
            metas = [meta for meta in args[1:] if isinstance(meta, msgspec.Meta)]
            if any((meta.extra or {}).get("size") for meta in metas):
                value = self.size(node, path, optional)
            else:
                value = self.value(node, args[0], path, optional=optional)
            return self.bounded(node, value, metas, path)
        if origin is Literal:
            return self.choice(node, list(args), path)
        if origin is tuple:
            return self.sequence(node, args[0], path)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(node, kind, path)
        return self.scalar(node, kind, path, optional)

    def scalar(self, node: Node, kind: type, path: KeyPath, optional: bool) -> Any:
        value = node.value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            expected = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]
            quote = "; put it in quotes" if kind is str and isinstance(value, (bool, int, float)) else ""
            null = " (or null)" if optional else ""
            return self.problem(node, path, f"{_show(node)} is {describe(value)}; {expected}{null} is expected{quote}")
        if isinstance(value, float) and not math.isfinite(value):
            return self.problem(node, path, f"{_show(node)} is not allowed; a finite number is expected")
        return value

    def choice(self, node: Node, allowed: list[Any], path: KeyPath) -> Any:
        if any(type(node.value) is type(one) and node.value == one for one in allowed):
            return node.value
        words = [str(one) for one in allowed]
        hint = suggestion(node.text, words)
        return self.problem(node, path, f"{_show(node)} is not allowed; allowed: {', '.join(words)}{hint}")

    def sequence(self, node: Node, kind: Any, path: KeyPath) -> Any:
        if get_origin(kind) is Literal and isinstance(node.value, str):  # one word is a list of one
            return [self.value(node, kind, path)]
        if not isinstance(node.value, list):
            return self.problem(node, path, f"{_show(node)} is {describe(node.value)}; a list is expected: [a, b]")
        return [self.value(item, kind, (*path, str(i))) for i, item in enumerate(node.value)]

    def size(self, node: Node, path: KeyPath, optional: bool) -> Any:
        if not isinstance(node.value, str):
            return self.scalar(node, int, path, optional)
        try:
            return parse_size(node.value)
        except PlancastError as error:
            return self.problem(node, path, str(error))

    def bounded(self, node: Node, value: Any, metas: list[msgspec.Meta], path: KeyPath) -> Any:
        if value is None:
            return None
        for meta in metas:
            limits = [
                (meta.ge, f"at least {meta.ge}", lambda v, b: v >= b),
                (meta.gt, f"more than {meta.gt}", lambda v, b: v > b),
                (meta.le, f"at most {meta.le}", lambda v, b: v <= b),
            ]
            texts = [text for bound, text, _ in limits if bound is not None]
            if any(bound is not None and not holds(value, bound) for bound, _, holds in limits):
                return self.problem(node, path, f"{_show(node)} is out of range; it must be {' and '.join(texts)}")
            if meta.min_length and len(value) < meta.min_length:
                return self.problem(node, path, "must not be empty")
            if meta.pattern and not re.search(meta.pattern, value):
                return self.problem(
                    node, path, f"{_show(node)} is not allowed; letters, digits and . _ - only, a letter or digit first"
                )
        return value


def _show(node: Node) -> str:
    """The value as written, short enough for a line."""
    text = repr(node.value) if isinstance(node.value, str) else node.text or str(node.plain())
    return text if len(text) <= 80 else text[:77] + "..."
