"""From an exported program to ONNX, in one go where the program allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPSET = 23  # the fusions to RMSNormalization and RotaryEmbedding exist for this opset exactly


def to_onnx(program: Any) -> torch.onnx.ONNXProgram:
    """Translate a `torch.export.ExportedProgram`, whose casts are changed in place.

    The exporter begins with `run_decompositions`, which traces the whole program again and takes as long as the first
    time. That serves two ends: to rid the program of in-place operators, of which a decoder has none as a rule, and to
    break up operators that have no translation. So it is left out first, and done where either turns out to be needed.
    """
    import torch

    _simplify_casts(program.graph)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    functional = all(not target._schema.is_mutable for target in targets if isinstance(target, torch._ops.OpOverload))
    if functional:
        program.run_decompositions = lambda *_args, **_kwargs: program
        try:
            return _translate(program)
        except torch.onnx.OnnxExporterError:
            pass
        finally:
            del program.run_decompositions
    return _translate(program)


def _translate(program: Any) -> torch.onnx.ONNXProgram:
    import torch

    from plugins.paged_attention.torch_op import translation_table

    translated = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        verbose=False,
        custom_translation_table=translation_table(),
    )
    assert translated is not None
    return translated


def _simplify_casts(graph: torch.fx.Graph) -> None:
    """Drop what does nothing in an f32 model on one device; write other casts in the form that has a translation."""
    import torch

    aten = torch.ops.aten
    casts = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default}
    idle = {aten.alias.default, aten.contiguous.default, aten.detach.default}
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in idle or (node.target is aten.dropout.default and node.args[2] is False):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in casts:
            source, dtype = node.args[0], node.meta["val"].dtype
            if source.meta["val"].dtype == dtype:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            else:
                node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
    graph.lint()
