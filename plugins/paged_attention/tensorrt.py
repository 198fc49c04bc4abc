"""`plancast::PagedAttention` for TensorRT: plugins compiled ahead of time, by Triton, to PTX that lies in the engine.

What each plugin launches stands in `tensorrt_launch.py`. Caches are pages (`kv_formats.py`): [num_blocks, Hkv, page] in
the cells' float type, else int8 bytes. TensorRT finds a plugin for an ONNX node by its type and the attribute
`plugin_namespace`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plugins.gpu.aot import Compiled, compile_variant, with_parameters
from plugins.paged_attention.tensorrt_launch import PLUGINS, Launch, Plugin

NAMESPACE = "plancast"
# TensorRT's names of data types -> Triton's pointer types, and the names that autotuning uses.
_POINTERS = {
    "FLOAT": "*fp32", "HALF": "*fp16", "BF16": "*bf16", "INT8": "*i8", "UINT8": "*u8", "INT32": "*i32", "INT64": "*i64",
}  # fmt: skip
_SPELLED = {"FLOAT": "FP32", "HALF": "FP16"}


def register_plugins(tensorrt_name: str = "tensorrt") -> dict[str, Callable[..., Any]]:
    """Register the plugins with `tensorrt.plugin`, compiled ahead of time and launched by Python (for development).

    Does nothing the second time. Returns the implementations ahead of time.

    `tensorrt_name`: the module, where it is not called `tensorrt`.

    Raises:
        ImportError: TensorRT is not installed.
    """
    trtp: Any = importlib.import_module(f"{tensorrt_name}.plugin")
    registered = _IMPLEMENTATIONS.get(tensorrt_name)
    if registered is None:
        registered = {name: _define(trtp, name, plugin) for name, plugin in PLUGINS.items()}
        _IMPLEMENTATIONS[tensorrt_name] = registered
    return registered


_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {}


def _define(trtp: Any, name: str, plugin: Plugin) -> Callable[..., Any]:
    """Register one plugin. Annotations are classes here, not text: `tensorrt.plugin` reads them."""
    desc, plugin_id = trtp.TensorDesc, f"{NAMESPACE}::{name}"
    outputs = tuple[(desc,) * len(plugin.outputs)]
    given = dict.fromkeys(plugin.inputs, desc) | dict(plugin.attributes)
    describe = _signed(lambda named: _outputs(trtp, name, named), given, desc if len(plugin.outputs) == 1 else outputs)
    trtp.register(plugin_id)(describe)
    if plugin.tactics:
        combinations = list[trtp.AutoTuneCombination]
        trtp.autotune(plugin_id)(
            _signed(lambda named: _combinations(trtp, plugin, named), given | {"outputs": outputs}, combinations)
        )
    tensors = tuple[(trtp.Tensor,) * len(plugin.outputs)]
    now = dict.fromkeys(plugin.inputs, trtp.Tensor) | dict(plugin.attributes) | {"outputs": tensors, "stream": int}
    trtp.impl(plugin_id)(
        _signed(lambda named: _run(name, named), now | ({"tactic": int} if plugin.tactics else {}), None)
    )
    returned = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
    implement = _signed(
        lambda named: _implement(trtp, plugin, named), given | {"outputs": outputs, "tactic": int}, returned
    )
    return trtp.aot_impl(plugin_id)(implement)


def _outputs(trtp: Any, name: str, named: dict[str, Any]) -> Any:
    """The descriptions of a plugin's outputs."""
    if name == "WriteKV":
        return named["key_cache"].aliased(), named["value_cache"].aliased()
    if name == "AttendSplits":
        f32 = importlib.import_module(trtp.__name__.rpartition(".")[0]).DataType.FLOAT
        lead = (named["splits"], named["query"].shape_expr[0], named["num_heads"])
        return trtp.from_shape_expr((*lead, named["v_head_size"]), f32), trtp.from_shape_expr((*lead, 2), f32)
    width = named["num_heads"] * named["v_head_size"]
    if name == "MergeSplits":
        return trtp.from_shape_expr((named["partial"].shape_expr[1], width), named["like"].dtype)
    return trtp.from_shape_expr((named["query"].shape_expr[0], width), named["query"].dtype)


def _combinations(trtp: Any, plugin: Plugin, named: dict[str, Any]) -> list[Any]:
    """The types as they are in the network, with every tactic."""
    kinds = [desc.dtype.name for desc in (*(named[name] for name in plugin.inputs), *named["outputs"])]
    types = ", ".join(str(_SPELLED.get(kind, kind)) for kind in kinds)
    return [trtp.AutoTuneCombination(types, "LINEAR", list(plugin.tactics))]


def _run(name: str, named: dict[str, Any]) -> None:
    """The implementation in Python: an engine that prefers it needs torch and Triton where it runs."""
    from plugins.paged_attention.tensorrt_jit import enqueue

    enqueue(name, named)


def _implement(trtp: Any, plugin: Plugin, named: dict[str, Any]) -> tuple[Any, ...]:
    """What an AOT implementation returns: the kernel's name, its PTX, the launch, and the lengths that it gets."""
    kinds = {name: _POINTERS[named[name].dtype.name] for name in plugin.inputs}
    rows = named[plugin.inputs[0]].shape_expr
    tokens = rows[1] if plugin.inputs[0] == "partial" else rows[0]
    sequences = named["past_lens"].shape_expr[0] if "past_lens" in named else None
    launch = plugin.launch(kinds, named, tokens, sequences, named["tactic"])
    compiled, ptx = _compiled(launch, named["compute_capability"])
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y, params.grid_z = (*launch.grid, 1, 1)[:3]
    params.block_x = 32 * compiled.num_warps
    params.shared_mem = compiled.shared
    extra = trtp.SymIntExprs(len(launch.lengths))
    for i, length in enumerate(launch.lengths):
        extra[i] = trtp.SymInt32(length)
    return compiled.entry, ptx, params, extra


def _compiled(launch: Launch, capability: int) -> tuple[Compiled, str]:
    """The kernel, and its PTX with the parameters that TensorRT passes."""
    compiled = compile_variant(launch.variant, capability, assemble=False)
    names = [name for name in launch.variant.kernel.arg_names if name not in launch.variant.constants]
    return compiled, with_parameters(compiled.ptx, names, launch.parameters, launch.aliases)


_ONNX = {
    "FLOAT": "FLOAT",
    "FLOAT16": "HALF",
    "BFLOAT16": "BF16",
}  # ONNX's names of data types that TensorRT has others of


def compile_node(name: str, attributes: Mapping[str, Any], kinds: Sequence[str]) -> list[Compiled]:
    """Compile the kernels of a plugin node, one a tactic. `kinds`: its inputs' data types, as ONNX names them.

    Raises:
        Exception: of Triton's many kinds, where a kernel does not compile.
    """
    plugin = PLUGINS[name]
    pointers = {n: _POINTERS[_ONNX.get(kind, kind)] for n, kind in zip(plugin.inputs, kinds, strict=True)}
    launches = [plugin.launch(pointers, attributes, 1, 1, tactic) for tactic in plugin.tactics or (0,)]
    return [_compiled(launch, attributes["compute_capability"])[0] for launch in launches]


def _signed(function: Callable[[dict[str, Any]], Any], annotations: dict[str, Any], result: Any) -> Callable[..., Any]:
    """`function` of one map as a function with the parameters that `tensorrt.plugin` reads and gives."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=a) for name, a in annotations.items()]
    signature = inspect.Signature(parameters, return_annotation=result)

    def signed(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named).arguments
        # The ONNX parser leaves the zero at the end of a text attribute (seen with TensorRT-RTX's).
        return function({n: value.rstrip("\0") if isinstance(value, str) else value for n, value in bound.items()})

    signed.__signature__ = signature  # type: ignore[attr-defined]
    return signed
