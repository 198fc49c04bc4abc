"""ONNX operators on torch tensors, as the fused graphs of a decoder have them.

A handler takes the node's attributes and inputs (None where left out) and returns one tensor or a tuple. Floats are
computed in the dtype that they come in; norms, softmax and rotary embedding in f32. Shapes are int64 tensors on the
CPU, so that reading one never waits for a device; all inputs but `HOST_ARGUMENTS` lie on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Attributes = dict[str, Any]
Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
# Inputs that are read on the host, such as the shape to reshape to: those stay on the CPU, all others go to the device.
HOST_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Unsqueeze": (1,), "Squeeze": (1,), "Split": (1,), "Slice": (1, 2, 3, 4), "Expand": (1,),
    "Tile": (1,), "Range": (0, 1, 2), "ConstantOfShape": (0,), "TopK": (1,), "OneHot": (1,),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"), (1,)),
}  # fmt: skip

_FLOAT, _FLOAT16, _BFLOAT16, _DOUBLE = 1, 10, 16, 11
_FLOATS = (_FLOAT, _FLOAT16, _BFLOAT16, _DOUBLE)
_INTEGERS = {
    2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
}  # fmt: skip


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    HANDLERS[name] = lambda attributes, x: function(x)


def _binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    HANDLERS[name] = lambda attributes, a, b: function(a, b)


for _name, _function in {
    "Neg": torch.neg, "Abs": torch.abs, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Cos": torch.cos,
    "Sin": torch.sin, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu, "Erf": torch.erf,
    "Softplus": functional.softplus, "Reciprocal": torch.reciprocal, "Not": torch.logical_not, "Floor": torch.floor,
    "Identity": lambda x: x, "Sign": torch.sign, "Round": torch.round,
}.items():  # fmt: skip
    _unary(_name, _function)
for _name, _function2 in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "Equal": torch.eq, "And": torch.logical_and,
    "Or": torch.logical_or, "Max": torch.maximum, "Min": torch.minimum, "MatMul": torch.matmul,
}.items():  # fmt: skip
    _binary(_name, _function2)


@handles("Div")
def _div(attributes: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@handles("Mod")
def _mod(attributes: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return (torch.fmod if attributes.get("fmod") else torch.remainder)(a, b)


@handles("Swish")
def _swish(attributes: Attributes, x: Tensor) -> Tensor:
    return x * torch.sigmoid(attributes.get("alpha", 1.0) * x)


@handles("Gelu")
def _gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=attributes.get("approximate", "none"))


@handles("LeakyRelu")
def _leaky_relu(attributes: Attributes, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, attributes.get("alpha", 0.01))


@handles("Clip")
def _clip(attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return torch.clamp(x, low, high)


@handles("Where")
def _where(attributes: Attributes, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@handles("Gemm")
def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    y = (a.T if attributes.get("transA") else a) @ (b.T if attributes.get("transB") else b)
    y = y * attributes.get("alpha", 1.0)
    return y if c is None else y + attributes.get("beta", 1.0) * c


@handles("Softmax")
def _softmax(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.softmax(x.float(), attributes.get("axis", -1)).to(x.dtype)


@handles("LogSoftmax")
def _log_softmax(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.log_softmax(x.float(), attributes.get("axis", -1)).to(x.dtype)


@handles("RMSNormalization")
def _rms_norm(attributes: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    axes = list(range(attributes.get("axis", -1) % x.ndim, x.ndim))
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + attributes.get("epsilon", 1e-5))
    return (normal * scale.float()).to(x.dtype)


@handles("LayerNormalization")
def _layer_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[attributes.get("axis", -1) % x.ndim :]
    y = functional.layer_norm(
        x.float(), shape, scale.float(), None if bias is None else bias.float(), attributes.get("epsilon", 1e-5)
    )
    return y.to(x.dtype)


@handles("RotaryEmbedding")
def _rotary(attributes: Attributes, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Opset 23: x [B, H, S, D] or [B, S, H * D]; cos and sin [B, S, R / 2], or [positions, R / 2] with positions."""
    heads = attributes.get("num_heads", 0)
    y = x if x.ndim == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    rotary = attributes.get("rotary_embedding_dim", 0) or y.shape[-1]
    turned, rest = y[..., :rotary].float(), y[..., rotary:]
    cos, sin = cos[:, None].float(), sin[:, None].float()
    if attributes.get("interleaved", 0):
        first, second = turned[..., ::2], turned[..., 1::2]
        result = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    result = torch.cat((result.to(x.dtype), rest), -1)
    return result if x.ndim == 4 else result.transpose(1, 2).flatten(-2)


@handles("Cast")
def _cast(attributes: Attributes, x: Tensor) -> Tensor:
    """To a float means: to the dtype that the engine computes in."""
    to = attributes["to"]
    if to in _FLOATS:
        return x.to(attributes["compute"])
    return x.to(_INTEGERS[to])


@handles("DequantizeLinear")
def _dequantize(attributes: Attributes, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = attributes.get("axis", 1) % max(1, x.ndim), attributes.get("block_size", 0)

    def spread(values: Tensor) -> Tensor:
        if block:
            return values.repeat_interleave(block, axis)[(slice(None),) * axis + (slice(x.shape[axis]),)]
        if values.ndim == 1 and values.numel() > 1:
            return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return values

    values = x.float()
    if zero is not None:
        values = values - spread(zero).float()
    return (values * spread(scale).float()).to(attributes["compute"])


# Shapes and indices -----------------------------------------------------------------------------------------------


@handles("Shape")
def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.shape[attributes.get("start", 0) : attributes.get("end")], dtype=torch.int64)


@handles("Size")
def _size(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@handles("Reshape")
def _reshape(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wanted = shape.tolist()
    if not attributes.get("allowzero"):
        wanted = [x.shape[i] if dim == 0 else dim for i, dim in enumerate(wanted)]
    return x.reshape(wanted)


@handles("Flatten")
def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    return x.reshape(x.shape[:axis].numel(), -1)


@handles("Transpose")
def _transpose(attributes: Attributes, x: Tensor) -> Tensor:
    return x.permute(attributes.get("perm") or list(range(x.ndim))[::-1])


@handles("Unsqueeze")
def _unsqueeze(attributes: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(a % rank for a in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


@handles("Squeeze")
def _squeeze(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


@handles("Concat")
def _concat(attributes: Attributes, *parts: Tensor) -> Tensor:
    return torch.cat(parts, attributes["axis"])


@handles("Split")
def _split(attributes: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is not None:
        return torch.split(x, sizes.tolist(), axis)
    return torch.split(x, -(-x.shape[axis] // attributes["num_outputs"]), axis)


@handles("Slice")
def _slice(
    attributes: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Any = None
) -> Tensor:
    count = starts.numel()
    axis_of = axes.tolist() if axes is not None else list(range(count))
    step_of = steps.tolist() if steps is not None else [1] * count
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axis_of, step_of, strict=True):
        if step < 0:
            length = x.shape[axis]
            taken = range(length)[slice(start, end if end >= -length else None, step)]
            x = x.index_select(axis, torch.arange(taken.start, taken.stop, taken.step, device=x.device))
        else:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]
    return x


@handles("Gather")
def _gather(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % max(1, x.ndim)
    flat = indices.reshape(-1).to(torch.int64)
    flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    picked = x.index_select(axis, flat)
    return picked.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@handles("GatherND")
def _gather_nd(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    if attributes.get("batch_dims", 0):
        raise ValueError("GatherND with batch dimensions is not known to the torch engine")
    return x[tuple(indices.unbind(-1))]


@handles("GatherElements")
def _gather_elements(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    return torch.gather(x, attributes.get("axis", 0), indices)


@handles("ScatterElements")
def _scatter_elements(attributes: Attributes, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if attributes.get("reduction", "none") == "add":
        return x.scatter_add(attributes.get("axis", 0), indices, updates)
    return x.scatter(attributes.get("axis", 0), indices, updates)


@handles("Expand")
def _expand(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, torch.Size(shape.tolist())))


@handles("Tile")
def _tile(attributes: Attributes, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(repeats.tolist())


@handles("Range")
def _range(attributes: Attributes, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@handles("ConstantOfShape")
def _constant_of_shape(attributes: Attributes, shape: Tensor) -> Tensor:
    value = attributes.get("value")
    return torch.zeros(shape.tolist()) if value is None else value.reshape(()).expand(shape.tolist()).clone()


@handles("TopK")
def _top_k(attributes: Attributes, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.topk(x, int(k.item()), attributes.get("axis", -1), bool(attributes.get("largest", 1)))
    return found.values, found.indices


@handles("ArgMax")
def _arg_max(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.argmax(x, attributes.get("axis", 0), keepdim=bool(attributes.get("keepdims", 1)))


@handles("OneHot")
def _one_hot(attributes: Attributes, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = functional.one_hot(indices, int(depth.item())).bool()
    off, on = values
    return torch.where(hot, on, off).movedim(-1, attributes.get("axis", -1))


def _reduction(function: Callable[..., Tensor]) -> Handler:
    def reduce(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        over = axes.tolist() if axes is not None else list(range(x.ndim))
        if not over and attributes.get("noop_with_empty_axes"):
            return x
        return function(x, over, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


for _name, _function3 in {
    "ReduceSum": torch.sum, "ReduceMean": torch.mean, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceL2": lambda x, over, keepdim: x.square().sum(over, keepdim=keepdim).sqrt(),
}.items():  # fmt: skip
    HANDLERS[_name] = _reduction(_function3)
