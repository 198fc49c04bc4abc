"""The attention plugins launched by Python, kernels compiled by Triton when they are met: for development.

An engine built with these needs Python, torch and Triton where it runs; one built ahead of time does not
(`tensorrt.py`). Both launch the same kernels with the same arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plugins.paged_attention.tensorrt_launch import PLUGINS

_KINDS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_VIEWS = {"*u8": torch.uint8, "*bf16": torch.bfloat16}  # bytes that TensorRT carries as int8


def run_plugin(
    name: str, attributes: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], tactic: int = 0
) -> None:
    """Launch the kernel of the plugin `name` on what TensorRT would pass: contiguous inputs, lengths, outputs.

    On a GPU, or interpreted on a CPU (TRITON_INTERPRET=1).
    """
    plugin = PLUGINS[name]
    given = dict(zip(plugin.inputs, inputs, strict=True))
    kinds = {n: _KINDS[tensor.dtype] for n, tensor in given.items()}
    rows = inputs[0].shape
    tokens = rows[1] if plugin.inputs[0] == "partial" else rows[0]
    sequences = len(given["past_lens"]) if "past_lens" in given else 0
    launch = plugin.launch(kinds, attributes, tokens, sequences, tactic)
    order = zip(launch.parameters, [*inputs, *launch.lengths, *outputs], strict=True)
    passed: dict[str, Any] = {parameter: value for parameter, value in order if parameter is not None}
    passed |= {alias: passed[other] for alias, other in launch.aliases.items()}
    variant = launch.variant
    for n, value in passed.items():
        kind = variant.types.get(n)
        if kind in _VIEWS and isinstance(value, Tensor):
            passed[n] = value.view(_VIEWS[kind])
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": variant.fp_fusion}
    variant.kernel[launch.grid](**passed, **variant.constants, **options)


def enqueue(name: str, named: Mapping[str, Any]) -> None:
    """What `tensorrt.plugin` calls: tensors by their addresses, on the stream that it names."""
    plugin = PLUGINS[name]
    with torch.cuda.stream(torch.cuda.ExternalStream(named["stream"])):
        inputs = [torch.as_tensor(named[n], device="cuda") for n in plugin.inputs]
        outputs = [torch.as_tensor(tensor, device="cuda") for tensor in named["outputs"]]
        run_plugin(name, named, inputs, outputs, named.get("tactic", 0))
