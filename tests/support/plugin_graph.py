"""A graph with TensorRT's plugin nodes, node by node on torch.

A plugin gets what TensorRT would pass, in its order, and is interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from plugins.paged_attention.tensorrt_jit import run_plugin
from plugins.paged_attention.tensorrt_launch import PLUGINS
from plugins.torch_engine.ops import HANDLERS


class PluginGraph:
    def __init__(self, model: ir.Model):
        self.nodes = list(model.graph)
        self.outputs = [value.name or "" for value in model.graph.outputs]
        self.constants: dict[str, Tensor] = {}
        for name, value in model.graph.initializers.items():
            assert value.const_value is not None
            self.constants[name] = torch.from_numpy(np.array(value.const_value.numpy()))

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The graph's outputs. Caches among `feeds` are written in place."""
        values = {**self.constants, **feeds}
        for node in self.nodes:
            inputs = [None if value is None else values[value.name or ""] for value in node.inputs]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            if node.op_type in PLUGINS:
                results = plugin(node.op_type, attributes, inputs)
            elif node.op_type == "Constant":
                results = [
                    torch.from_numpy(np.array(attribute.as_tensor().numpy())) for attribute in node.attributes.values()
                ]
            else:
                dtype = node.outputs[0].dtype
                compute = torch.float32 if dtype == ir.DataType.FLOAT else torch.float16
                attributes = {n: list(v) if isinstance(v, tuple) else v for n, v in attributes.items()}
                result = HANDLERS[node.op_type](attributes | {"compute": compute}, *inputs)
                results = result if isinstance(result, tuple) else [result]
            values |= {value.name or "": result for value, result in zip(node.outputs, results, strict=False)}
        return {name: values[name] for name in self.outputs}


def plugin(name: str, attributes: dict, inputs: list) -> list:
    """Run a plugin's kernel; nothing that it does not write has a value."""
    inputs = [tensor.contiguous() for tensor in inputs]
    assert set(attributes) == {*PLUGINS[name].attributes, "plugin_namespace", "plugin_version"}
    given = dict(zip(PLUGINS[name].inputs, inputs, strict=True))
    heads, size = attributes["num_heads"], attributes["v_head_size"]
    tokens = inputs[0].shape[1] if name == "MergeSplits" else inputs[0].shape[0]
    if name == "WriteKV":
        outputs = [given["key_cache"], given["value_cache"]]  # aliased
    elif name == "AttendSplits":
        lead = (attributes["splits"], tokens, heads)
        outputs = [torch.full((*lead, size), torch.nan), torch.full((*lead, 2), torch.nan)]
    else:
        like = inputs[0] if name == "Attend" else given["like"]
        outputs = [torch.full((tokens, heads * size), torch.nan, dtype=like.dtype)]
    run_plugin(name, attributes, inputs, outputs)
    return outputs
