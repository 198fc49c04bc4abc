"""What a pass is: a change of the graph, with the conditions that it needs and those that it leaves behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe

# Says what is wrong with a graph, or returns None. Conditions stand in conditions.py.
Condition = Callable[["ir.Model"], str | None]


class GraphPass(ABC):
    """One rewrite of a graph, in place. What the graph computes stays the same, but for the rounding that a recipe
    asks for (`set_dtype`, `quantize_weights`)."""

    name: ClassVar[str]
    requires: ClassVar[tuple[Condition, ...]] = ()  # hold before
    ensures: ClassVar[tuple[Condition, ...]] = ()  # hold after

    @abstractmethod
    def run(self, model: ir.Model, recipe: Recipe) -> int:
        """Rewrite `model` and return how many places changed."""
