"""Let an engine with a draft head give the hidden states that its logits are read off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.passes.base import GraphPass
from builder.passes.conditions import tokens_first, well_formed
from builder.passes.gather_rows import picks_rows
from builder.tracing.signature import HIDDEN
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe


class ExposeHidden(GraphPass):
    """The rows that were picked for the head become a second output, hidden `f32[R, H]`, where the recipe has a
    `draft_head`. Runs where the trace's pick still stands after the final norm."""

    name = "expose_hidden"
    requires = (well_formed, tokens_first)
    ensures = (well_formed, tokens_first)

    def run(self, model: ir.Model, recipe: Recipe) -> int:
        if recipe.draft_head is None:
            return 0
        picks = [node for node in model.graph if picks_rows(node)]
        if len(picks) != 1:
            raise BuildError(
                f"the traced model picks its logits' rows {len(picks)} times, not once: it cannot have a draft_head"
            )
        (hidden,) = picks[0].outputs
        hidden.name = HIDDEN
        model.graph.outputs.append(hidden)
        return 1
