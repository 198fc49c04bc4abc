"""ONNX models of a single PagedAttention node."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper
from paged_cases import PagedCase

from plugins.paged_attention.op import DOMAIN, INPUTS, OP_TYPE, OUTPUTS, VERSION, register_onnx_schema


def single_node_model(case: PagedCase) -> onnx.ModelProto:
    """A checked model with one PagedAttention node, whose graph inputs are the case's inputs."""
    register_onnx_schema()
    names = [name if name in case.inputs else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    node = helper.make_node(OP_TYPE, names, list(OUTPUTS), domain=DOMAIN, layer=0, **case.attributes)
    inputs = []
    for name in filter(None, names):
        array = case.inputs[name]
        # The first dimension grows with the batch; the rest is the model's.
        shape = [f"{name}_size" if name not in ("sinks", "alibi_slopes") else array.shape[0], *array.shape[1:]]
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(name, dtype, shape if array.ndim else []))
    width = case.attributes["num_heads"] * case.attributes["v_head_size"]
    output = helper.make_tensor_value_info(OUTPUTS[0], TensorProto.FLOAT, ["T", width])
    model = helper.make_model(
        helper.make_graph([node], "paged_attention", inputs, [output]),
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    return model
