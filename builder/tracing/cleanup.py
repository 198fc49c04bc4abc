"""Constant folding and rewriting of a freshly traced graph: onnxscript's rules, without the one that is quadratic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

_FOLD_INPUT_LIMIT, _FOLD_OUTPUT_LIMIT = 8192, 512 * 512  # elements, onnxscript's defaults


def cleanup(model: ir.Model) -> None:
    """Fold shape arithmetic to constants, drop no-op nodes and duplicates, in place.

    This is `onnxscript.optimizer.optimize` without `SlicesSplit`, which compares every pair of slices (338 s against
    2 s at 80 layers), without the no-op rules, which take 1e-8 for 0 and so drop a norm's epsilon, and without what
    never occurs in a decoder (convolutions, batch norms). Weights must be graph inputs: then nothing of their size is
    folded.
    """
    import onnx_ir as ir
    import onnx_ir.passes.common as common
    from onnxscript.optimizer import _constant_folding
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules.common import _basic_rules as basic
    from onnxscript.rewriter.rules.common import _collapse_slices, _materialize_reshape_shape

    rules = [
        *_collapse_slices.rules,
        *_materialize_reshape_shape.rules,
        basic.cast_cast_rule,
        basic.no_op_cast_rule,
        basic.no_op_expand_rule,
        basic.flatten_to_reshape_rule,
        basic.reshape_reshape_rule,
        basic.no_op_transpose_rule,
        basic.transpose_transpose_rule,
        basic.unsqueeze_unsqueeze_rule,
        basic.squeeze_reshape_1d_rule,
    ]
    simplify = ir.passes.PassManager(
        [
            _constant_folding.FoldConstantsPass(
                shape_inference=True, input_size_limit=_FOLD_INPUT_LIMIT, output_size_limit=_FOLD_OUTPUT_LIMIT
            ),
            RewritePass(rules),
            common.RemoveUnusedNodesPass(),
        ],
        steps=2,
        early_stop=True,
    )
    ir.passes.Sequential(
        common.InlinePass(),
        simplify,
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    )(model)
