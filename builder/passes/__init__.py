"""Passes: from a traced graph to the graph that a backend compiles. One pass a file, in the order of `PASSES`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.passes.base import Condition, GraphPass
    from builder.quantization.prepare import PreparedWeights
    from builder.recipe import Recipe


class PassStats(NamedTuple):
    """What one pass did: places changed, nodes by operator before and after, seconds."""

    name: str
    changes: int
    before: Counter[str]
    after: Counter[str]
    seconds: float


def run_passes(
    model: ir.Model,
    recipe: Recipe,
    on_pass: Callable[[str], None] | None = None,
    stats: list[PassStats] | None = None,
    passes: list[GraphPass] | None = None,
) -> ir.Model:
    """Fuse `model` (of `builder.trace.trace`) and bring it into the recipe's dtypes, in place.

    Args:
        on_pass: called with the name of each pass as it begins.
        stats: gets an entry for each pass.
        passes: which to run; all of `make_passes` unless told otherwise.

    Raises:
        BuildError: a graph does not meet a pass's conditions, before it or after.
    """
    for graph_pass in make_passes() if passes is None else passes:
        if on_pass is not None:
            on_pass(graph_pass.name)
        _check(model, graph_pass, "requires", graph_pass.requires)
        before, start = _operators(model), time.perf_counter()
        changes = graph_pass.run(model, recipe)
        seconds = time.perf_counter() - start
        _check(model, graph_pass, "ensures", graph_pass.ensures)
        if stats is not None:
            stats.append(PassStats(graph_pass.name, changes, before, _operators(model), seconds))
    return model


def make_passes() -> list[GraphPass]:
    """The passes, in their order."""
    return [*fusing_passes(), *precision_passes()]


def fusing_passes() -> list[GraphPass]:
    """The passes that leave what the graph computes as it is, in f32."""
    from builder.passes.expose_hidden import ExposeHidden
    from builder.passes.fuse_rmsnorm import FuseRMSNorm
    from builder.passes.fuse_rope import FuseRope
    from builder.passes.gather_rows import GatherRows
    from builder.passes.merge_gate_up import MergeGateUp
    from builder.passes.merge_qkv import MergeQKV
    from builder.passes.tidy import Tidy
    from builder.passes.tokens_first import TokensFirst
    from builder.passes.unify_products import UnifyProducts

    return [
        Tidy(),
        TokensFirst(),
        UnifyProducts(),
        Tidy(),
        FuseRMSNorm(),
        FuseRope(),
        Tidy(),
        ExposeHidden(),
        GatherRows(),
        MergeQKV(),
        MergeGateUp(),
    ]


def precision_passes(prepared: PreparedWeights | None = None) -> list[GraphPass]:
    """The passes that bring a fused graph into the recipe's dtypes; `prepared`: weights that are quantized already."""
    from builder.passes.quantize_kv import QuantizeKV
    from builder.passes.quantize_weights import QuantizeWeights
    from builder.passes.set_dtype import SetDtype
    from builder.quantization.prepare import PreparedWeights

    prepared = prepared or PreparedWeights()
    return [SetDtype(), QuantizeWeights(prepared.quantized), QuantizeKV(prepared.kv_scales)]


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _check(model: ir.Model, graph_pass: GraphPass, kind: str, conditions: tuple[Condition, ...]) -> None:
    for condition in conditions:
        if problem := condition(model):
            raise BuildError(
                f"the pass {graph_pass.name} {kind} {condition.__name__}, and {problem}; this is a fault of plancast: "
                "report it with the model's config.json"
            )
