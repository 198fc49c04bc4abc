"""What must hold of a traced graph: each layer attends through our operator, and nothing else mixes tokens.

The flat batch holds several sequences end to end, so an operator that looks along the token axis (a convolution, a
scan, attention written out) would leak one request into another. The graph shows it: an axis as long as the batch is
`T`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import DOMAIN
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

_TOKENS = re.compile(r"T|\d+\*T|T\*\d+")  # a token axis, or one with a fixed number of entries a token

POINTWISE = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Clip", "ConstantOfShape", "Cos", "Div", "Dropout", "Elu", "Equal", "Erf",
        "Exp", "Expand", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsNaN",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "OneHot",
        "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Squeeze",
        "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Transpose", "Unsqueeze", "Where", "Xor",
    }
)  # fmt: skip
_ONE_AXIS = frozenset(
    {
        "ArgMax", "ArgMin", "Concat", "GatherElements", "Hardmax", "LogSoftmax", "ScatterElements", "Softmax", "Split",
        "TopK",
    }
)  # fmt: skip
_FROM_AXIS = frozenset({"LayerNormalization", "RMSNormalization"})
_DEFAULT_AXIS = {"Split": 0, "ArgMax": 0, "ArgMin": 0, "ScatterElements": 0, "GatherElements": 0}
_SHAPE_ARITHMETIC = frozenset(
    {"Add", "Cast", "Concat", "Div", "Gather", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)


def check_attention_layers(model: ir.Model, expected: int, architecture: str) -> None:
    """Raises BuildError unless layers 0 to `expected - 1` each have one `plancast::PagedAttention` node."""
    layers = sorted(node.attributes["layer"].as_int() for node in attention_nodes(model))
    if layers != list(range(expected)):
        raise BuildError(
            f"{architecture} has {expected} layers, and {len(layers)} of them attend through AttentionInterface "
            f"({layers[:8]}{'...' if len(layers) > 8 else ''}); the rest would see no cache, so it cannot be built"
        )


def check_token_axis(model: ir.Model) -> None:
    """Raises BuildError if a node other than PagedAttention moves information from one token to another.

    Knows what each operator does along its axes; an operator that it does not know is refused where it sees tokens.
    """
    lengths: set[ir.Value] = set()  # values computed from the number of tokens: they may only become shapes
    for node in model.graph:
        if node.domain == DOMAIN:
            continue
        if node.op_type == "Shape":
            lengths.update(node.outputs if _token_axes(node.inputs[0]) else ())
            continue
        if any(value in lengths for value in node.inputs if value is not None):
            if _picks_static_dimension(node):
                continue
            if node.op_type in _SHAPE_ARITHMETIC and not _reads_tokens(node):
                lengths.update(node.outputs)
                continue
            if node.op_type not in ("Reshape", "Expand", "ConstantOfShape") or node.inputs[0] in lengths:
                raise _mixes(node, "computes with the number of tokens in the batch")
        if not _reads_tokens(node) and not any(_token_axes(value) for value in node.outputs):
            continue
        if problem := _problem(node):
            raise _mixes(node, problem)


def _problem(node: ir.Node) -> str | None:
    """Why `node` mixes tokens, or None."""
    for value in node.outputs:
        if value.shape is None:
            return "has an output of unknown shape"
        if len(_token_axes(value)) > 1:
            return f"relates tokens to tokens ({_describe(value)})"
        for dim in value.shape:
            if not isinstance(dim, int) and "T" in str(dim) and not _TOKENS.fullmatch(str(dim).replace(" ", "")):
                return f"regroups the tokens ({_describe(value)})"
    data = next(value for value in node.inputs if value is not None)
    along = _token_axes(data)
    op = node.op_type
    if op in POINTWISE:
        return None
    if op == "Reshape":
        return None if _same_prefix(data, node.outputs[0]) else f"regroups the tokens of {_describe(data)}"
    if op.startswith("Reduce"):
        return _crosses(along, data, _axes(node, "axes", input_index=1, default=range(_rank(data))))
    if op in _ONE_AXIS:
        axis = node.attributes.get_int("axis", _DEFAULT_AXIS.get(op, -1))
        return next((p for v in node.inputs if (p := _crosses(_token_axes(v), v, [axis]))), None)
    if op in _FROM_AXIS:
        axis = node.attributes.get_int("axis", -1)
        return _crosses(along, data, range(axis % _rank(data), _rank(data)))
    if op == "Slice":
        return _crosses(along, data, _axes(node, "axes", input_index=3, default=range(_rank(data))))
    if op == "Gather":
        return _crosses(along, data, [] if _picks_rows(node) else [node.attributes.get_int("axis", 0)])
    if op == "GatherND":
        return None if _picks_rows(node) else _crosses(along, data, range(_rank(data)))
    if op in ("MatMul", "Gemm"):
        right = node.inputs[1]
        contracted = -2 if op == "Gemm" and node.attributes.get_int("transA", 0) else -1
        return _crosses(along, data, [contracted]) or _crosses(_token_axes(right), right, range(_rank(right)))
    return "is not known to keep tokens apart"


def _picks_static_dimension(node: ir.Node) -> bool:
    """Whether `node` takes, out of the shape of a value with tokens, a dimension that is a fixed number."""
    shape_node = node.inputs[0].producer() if node.op_type == "Gather" and node.inputs[0] is not None else None
    index = node.inputs[1].const_value if shape_node is not None and node.inputs[1] is not None else None
    if shape_node is None or shape_node.op_type != "Shape" or index is None or shape_node.inputs[0] is None:
        return False
    shape = shape_node.inputs[0].shape
    dims = list(shape or ())[slice(shape_node.attributes.get_int("start", 0), shape_node.attributes.get_int("end", 99))]
    return all(isinstance(dims[i], int) for i in index.numpy().reshape(-1).tolist())


def _picks_rows(node: ir.Node) -> bool:
    """Whether the indices of a gather come from the input `logits_rows`."""
    value: ir.Value | None = node.inputs[1]
    while value is not None:
        if value.name == "logits_rows":
            return True
        producer = value.producer()
        value = next(iter(producer.inputs), None) if producer is not None else None
    return False


def _token_axes(value: ir.Value | None) -> list[int]:
    if value is None or value.shape is None:
        return []
    return [i for i, dim in enumerate(value.shape) if not isinstance(dim, int) and "T" in str(dim)]


def _reads_tokens(node: ir.Node) -> bool:
    return any(_token_axes(value) for value in node.inputs)


def _rank(value: ir.Value | None) -> int:
    return len(value.shape) if value is not None and value.shape is not None else 0


def _axes(node: ir.Node, name: str, *, input_index: int, default: Iterable[int]) -> Iterable[int]:
    if len(node.inputs) > input_index and (value := node.inputs[input_index]) is not None:
        return value.const_value.numpy().tolist() if value.const_value is not None else default
    return node.attributes[name].as_ints() if name in node.attributes else default


def _crosses(token_axes: list[int], value: ir.Value | None, axes: Iterable[int]) -> str | None:
    rank = _rank(value)
    hit = any(axis % rank in token_axes for axis in axes) if rank else False
    return f"works along the tokens of {_describe(value)}" if hit else None


def _same_prefix(data: ir.Value, output: ir.Value) -> bool:
    """Whether a reshape leaves as many entries before the token axis as there were: then each token keeps its own."""
    if data.shape is None or output.shape is None or not _token_axes(data) or not _token_axes(output):
        return False

    def prefix(shape: ir.Shape, axis: int) -> int:
        product = 1
        for dim in shape[:axis]:
            product *= int(str(dim)) if isinstance(dim, int) else 0
        return product

    return prefix(data.shape, _token_axes(data)[0]) == prefix(output.shape, _token_axes(output)[0]) != 0


def _describe(value: ir.Value | None) -> str:
    return f"{value.name} {[str(dim) for dim in value.shape or ()]}".replace("'", "") if value is not None else "?"


def _mixes(node: ir.Node, problem: str) -> BuildError:
    return BuildError(
        f"the traced graph's {node.op_type} node {node.name or node.outputs[0].name!r} {problem}: outside attention, "
        "tokens of different requests would mix; this model cannot be built"
    )
