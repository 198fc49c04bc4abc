"""Run in a process of its own over stub libraries: registers our plugins with the real `tensorrt.plugin` module.

Prints JSON: for each plugin what its AOT implementation gives, its lengths computed by an evaluator of ours.
"""

from __future__ import annotations

import inspect
import json
import re
import sys

import tensorrt_bindings

sys.modules["tensorrt"] = tensorrt_bindings
import tensorrt.plugin as trtp  # noqa: E402
from simulated_trt import lacking  # noqa: E402
from tensorrt_bindings.tensorrt import DataType, DimensionOperation  # noqa: E402

from plugins.gpu.aot import _assemble  # noqa: E402
from plugins.paged_attention.tensorrt import register_plugins  # noqa: E402
from plugins.paged_attention.tensorrt_launch import PLUGINS  # noqa: E402

T, B, N, NUM_BLOCKS = 13, 3, 7, 20
HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 64, 32


class Number:
    """A dimension whose value is known."""

    def __init__(self, value: int):
        self.value = value


class Evaluator:
    """What TensorRT's expression builder does, on numbers."""

    def constant(self, value: int) -> Number:
        return Number(value)

    def operation(self, op: DimensionOperation, a: Number, b: Number) -> Number:
        sums = {
            DimensionOperation.SUM: a.value + b.value,
            DimensionOperation.PROD: a.value * b.value,
            DimensionOperation.FLOOR_DIV: a.value // max(1, b.value),
        }
        return Number(sums[op])


def tensor(shape: tuple[int, ...], kind: DataType) -> trtp.TensorDesc:
    dims = []
    for dim in shape:
        expr = trtp.ShapeExpr()
        expr._int_expr, expr._is_dummy = Number(dim), False
        dims.append(expr)
    return trtp.from_shape_expr(tuple(dims), kind)


def value(expr) -> int:
    return expr._int_expr.value


class WithNumbers:
    """The `tensorrt` module, whose dimensions are numbers: the real ones come from a builder, which needs a GPU."""

    IDimensionExpr = Number

    def __getattr__(self, name: str):
        return getattr(tensorrt_bindings, name)


def main() -> None:
    assert not lacking(tensorrt_bindings), lacking(tensorrt_bindings)  # what the executor calls
    tensors = sys.modules["tensorrt.plugin._tensor"]
    tensors.trt = WithNumbers()
    tensors.SymIntExpr._exprBuilder = Evaluator()
    implementations = register_plugins()
    assert register_plugins() is implementations  # the second time does nothing
    namespace = trtp.op.plancast
    i32 = DataType.INT32
    tables = {
        "past_lens": tensor((B,), i32), "query_starts": tensor((B + 1,), i32), "block_ids": tensor((N,), i32),
        "block_starts": tensor((B + 1,), i32),
    }  # fmt: skip
    page = BLOCK * (SIZE + 2)
    half, byte = DataType.HALF, DataType.INT8
    caches = {name: tensor((NUM_BLOCKS, KV_HEADS, page), byte) for name in ("key_cache", "value_cache")}
    rows = tensor((T, HEADS * SIZE), half)
    new = {name: tensor((T, KV_HEADS * SIZE), half) for name in ("key", "value")}
    per_head = {name: tensor((HEADS,), half) for name in ("sinks", "alibi_slopes")}
    layer = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "v_head_size": SIZE, "scale": 0.125,
        "sliding_window": 0, "softcap": 0.0, "kv_dtype": "int8", "group_size": 32, "key_scale": 0.0, "value_scale": 0.0,
        "block_size": BLOCK, "compute_capability": 90,
    }  # fmt: skip
    attend = {"query": rows, **caches, **tables, **per_head}
    extra = {"has_sinks": 0, "has_alibi": 0, "splits": 4, "block_m": 16}
    partial = {
        "partial": tensor((4, T, HEADS, SIZE), DataType.FLOAT),
        "partial_stats": tensor((4, T, HEADS, 2), DataType.FLOAT),
    }
    merge = {name: (layer | extra)[name] for name in ("num_heads", "v_head_size", "splits", "compute_capability")}
    calls = {
        "WriteKV": ({**new, **caches, **tables}, layer),
        "Attend": (attend, layer | extra),
        "AttendSplits": (attend, layer | extra),
        "MergeSplits": ({**partial, "like": rows}, merge),
    }
    told = {}
    for name in PLUGINS:
        inputs, attributes = calls[name]
        definition = getattr(namespace, name)
        assert definition.input_tensor_names == list(inputs), definition.input_tensor_names
        outputs = definition.register_func(*inputs.values(), **attributes)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        entry, ptx, launch, lengths = definition.aot_impl_func(*inputs.values(), *attributes.values(), outputs, 0)
        tuned = (
            definition.autotune_func(*inputs.values(), *attributes.values(), outputs) if PLUGINS[name].tactics else []
        )
        header = re.search(rf"\.entry {entry}\((.*?)\n\)", ptx, re.DOTALL)
        run = list(inspect.signature(definition.impl_func).parameters)
        told[name] = {
            "python": run == [*inputs, *attributes, "outputs", "stream", *(["tactic"] if tuned else [])],
            "python_tactic": definition.expects_tactic,
            "inputs": len(inputs),
            "outputs": [[value(dim) for dim in out.shape_expr] for out in outputs],
            "dtypes": [out.dtype.name for out in outputs],
            "aliased": [out.get_aliased() is inputs.get(n) for out, n in zip(outputs, caches, strict=False)],
            "parameters": re.findall(r"\.param \.(\w+)", header[1]),
            "assembles": _assemble(ptx)[0] is not None,
            "tactics": [
                [case.tactics, [kind.name for kind in case.types]] for one in tuned for case in one._get_combinations()
            ],
            "grid": [value(launch.grid_x), value(launch.grid_y), value(launch.grid_z)],
            "threads": value(launch.block_x),
            "lengths": [value(length) for length in lengths],
        }
    print(json.dumps(told))


main()
