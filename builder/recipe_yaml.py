"""YAML with positions: every value knows the file and line that it came from, so that an error can name them.

Scalars follow YAML 1.2's core schema: `on` and `yes` are text, 1e-3 is a number. Duplicate keys, tags, anchors and
several documents are refused: a recipe says each thing once, and plainly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import RecipeError

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 20
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan"),
    ".inf": float("inf"), ".Inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), "-.Inf": float("-inf"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands: `where` is `file:line`, or the override that set it.

    `value` is a scalar, a list of nodes, or a dict of nodes by key. `text` is a scalar as it was written.
    """

    value: Any
    where: str
    text: str = ""

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def read_yaml(path: Path) -> Node:
    """The mapping in the file at `path`. Raises `RecipeError` where it cannot be read, with the line."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise RecipeError(f"{path}: {size} bytes; a recipe takes {_MAX_BYTES} at most")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    node = parse_yaml(text, display(path), numbered=True)
    if not isinstance(node.value, dict):
        raise RecipeError(f"{node.where}: a recipe is a mapping of keys to values, not {describe(node.value)}")
    return node


def display(path: Path) -> str:
    """`path` as a person would type it: relative where it lies below the working folder."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def parse_yaml(text: str, source: str, *, numbered: bool) -> Node:
    """Parse one document. `where` of each node is `source`, with `:line` after it if `numbered`."""
    try:
        root = yaml.compose(text, yaml.BaseLoader)
        return _Converter(source, numbered).convert(root) if root is not None else Node(None, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if numbered and mark else source
        text = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{where}: not valid YAML: {text}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise RecipeError(f"{source}: nested too deeply") from None


def describe(value: Any) -> str:
    """What kind of thing `value` is, for a person."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


class _Converter:
    def __init__(self, source: str, numbered: bool):
        self.source = source
        self.numbered = numbered
        self.seen: set[int] = set()

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.numbered else self.source

    def convert(self, node: yaml.Node, where: str | None = None, depth: int = 0) -> Node:
        where = where or self.where(node)
        if id(node) in self.seen:
            raise RecipeError(f"{where}: a YAML alias; write the value out, or use `extends`")
        self.seen.add(id(node))
        if node.tag not in _PLAIN_TAGS:
            raise RecipeError(f"{where}: a YAML tag ({node.tag}); write plain values")
        if depth > _MAX_DEPTH:
            raise RecipeError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
        if isinstance(node, yaml.MappingNode):
            return Node(self.mapping(node, depth), where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.convert(item, None, depth + 1) for item in node.value], where)
        assert isinstance(node, yaml.ScalarNode)
        if node.style is not None:  # quoted or a block: text
            return Node(node.value, where, node.value)
        return Node(_scalar(node.value, where), where, node.value)

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{where}: a key must be a word")
            key = key_node.value
            if key in entries:
                raise RecipeError(f"{where}: key {key!r} is given twice (first at {entries[key].where})")
            entries[key] = self.convert(value_node, where, depth + 1)
        return entries


def _scalar(text: str, where: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 30:
            raise RecipeError(f"{where}: the number {text[:30]}... is too large")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
