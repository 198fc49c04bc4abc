"""Products with constant weights become `Linear`, in every form that DequantizeLinear takes, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import openvino as ov
import pytest
from onnx import TensorProto, helper
from openvino import opset13 as ops

from plugins.linear.openvino import lower_linear
from plugins.linear.openvino_weights import product_weight
from plugins.linear.reference import dense

CHANNELS, COLUMNS = 48, 128
F32 = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


@pytest.fixture(scope="module")
def native() -> Path:
    from plugins.native import NativeBuildError, build_native

    try:
        return build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")


class Form(NamedTuple):
    """How a weight is written: its dtype, its groups (0: a scale a channel), and what else there is."""

    dtype: str
    group: int = 0
    zero: bool = False
    minima: bool = False
    turned: bool = False  # stored [N, K] behind a Transpose, rather than [K, N]


def write(path: Path, form: Form) -> np.ndarray:
    """An ONNX model of one product in this form; returns the weight it stands for, f64 [N, K]."""
    rng = np.random.default_rng(5)
    dtype = {"int8": np.int8, "uint8": np.uint8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}[form.dtype]
    low, high = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16)}[form.dtype]
    groups, width = (COLUMNS // form.group, form.group) if form.group else (1, COLUMNS)
    values = rng.integers(low, high, (CHANNELS, COLUMNS))
    scale = (rng.random((CHANNELS, groups)) / 100).astype(np.float16).astype(np.float32)
    zero = rng.integers(low, high, (CHANNELS, groups)) if form.zero else np.zeros((CHANNELS, groups), np.int64)
    minima = -rng.random((CHANNELS, groups)).astype(np.float32) if form.minima else None
    expected = (values - np.repeat(zero, width, 1)) * np.repeat(scale.astype(np.float64), width, 1)

    def side(array: np.ndarray) -> np.ndarray:
        array = array[:, 0] if groups == 1 and array is not values else array
        return array if form.turned or array.ndim == 1 else array.T.copy()

    stored = {"w": side(values).astype(dtype), "s": side(scale)} | (
        {"z": side(zero).astype(dtype)} if form.zero else {}
    )
    attributes = {"axis": (1, 0)[form.turned]} if groups == 1 else {"axis": int(form.turned), "block_size": width}
    nodes = [helper.make_node("DequantizeLinear", list(stored), ["d"], **attributes)]
    if form.turned:
        nodes.append(helper.make_node("Transpose", ["d"], ["dt"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "dt" if form.turned else "d"], ["main" if form.minima else "y"]))
    if minima is not None:
        expected = expected + np.repeat(minima.astype(np.float64), width, 1)
        stored |= {"m": minima.T.copy(), "shape": np.array([-1, groups, width]), "axes": np.array([-1])}
        nodes += [
            helper.make_node("Reshape", ["x", "shape"], ["blocks"]),
            helper.make_node("ReduceSum", ["blocks", "axes"], ["sums"], keepdims=0),
            helper.make_node("MatMul", ["sums", "m"], ["term"]),
            helper.make_node("Add", ["main", "term"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["t", CHANNELS])],
        initializer=[ir.to_proto(ir.tensor(array, name=name)) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), path)
    return expected


BOTH = (False, True)
FORMS = [
    *(Form("int8", group, zero, turned=turned) for group in (0, 32) for zero in BOTH for turned in BOTH),
    *(Form("int4", group, turned=turned) for group in (0, 32, 64, 128) for turned in BOTH),
    *(Form("uint4", group, zero, turned=True) for group in (0, 32, 64) for zero in BOTH),
    Form("int4", 32, zero=True),
    Form("uint8", 32),
    Form("uint8", 0, zero=True),
    *(Form("uint4", group, minima=True, turned=turned) for group in (0, 32) for turned in BOTH),
    *(Form("uint8", group, minima=True, turned=turned) for group in (0, 32) for turned in BOTH),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_form_is_lowered_exactly(form: Form, native: Path, tmp_path: Path) -> None:
    expected = write(tmp_path / "m.onnx", form)
    core = ov.Core()
    core.add_extension(str(native))
    ov.save_model(core.read_model(tmp_path / "m.onnx"), tmp_path / "m.xml", compress_to_fp16=False)
    model = core.read_model(tmp_path / "m.xml")  # as an engine's portable form is
    assert lower_linear(model, native) == 1
    assert not {"MatMul", "Convert"} & {node.get_type_name() for node in model.get_ops()}
    compiled = core.compile_model(model, "CPU", F32)
    # One column at a time: 1 is exact in any rounding of activations, so the weight's own values come out.
    np.testing.assert_allclose(
        compiled({"x": np.eye(COLUMNS, dtype=np.float32)})["y"].T, expected, rtol=2e-6, atol=1e-7
    )
    x = np.random.default_rng(1).standard_normal((5, COLUMNS)).astype(np.float32)
    blob = core.import_model(compiled.export_model().getvalue(), "CPU", F32)
    np.testing.assert_array_equal(blob({"x": x})["y"], compiled({"x": x})["y"])
    exact = x @ expected.T
    assert np.abs(compiled({"x": x})["y"] - exact).max() <= 0.05 * exact.std()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_bf16_weights_are_lowered(turned: bool, compute: str, native: Path) -> None:
    x = ops.parameter([-1, COLUMNS], np.float32, name="x")
    values = np.random.default_rng(0).standard_normal((CHANNELS, COLUMNS)).astype(ml_dtypes.bfloat16)
    stored = values if turned else np.ascontiguousarray(values.T)
    constant = ops.constant(ov.Tensor(stored.view(np.uint16), ov.Shape(list(stored.shape)), ov.Type.bf16))
    product = ops.matmul(x, ops.convert(constant, ov.Type.f32), False, turned)
    product.output(0).set_names({"y"})
    model = ov.Model([product.output(0)], [x])
    assert lower_linear(model, native, compute=compute) == 1
    core = ov.Core()
    core.add_extension(str(native))
    data = np.random.default_rng(1).standard_normal((9, COLUMNS)).astype(np.float32)
    result = core.compile_model(model, "CPU", F32)({"x": data})["y"]
    exact = data @ values.astype(np.float32).T
    assert np.abs(result - exact).max() <= (2e-2 if compute == "bf16" else 1e-4) * exact.std()


def test_values_come_out_as_they_are_stored(tmp_path: Path) -> None:
    expected = write(tmp_path / "m.onnx", Form("uint4", 32, zero=True, turned=True))
    model = ov.Core().read_model(tmp_path / "m.onnx")
    weight = product_weight(next(node for node in model.get_ops() if node.get_type_name() == "MatMul"))
    assert weight is not None
    assert (weight.kind, weight.group, weight.low) == ("int4", 32, "zero")
    assert weight.f16_scale
    np.testing.assert_allclose(dense(weight), expected, rtol=1e-6)


def _integers() -> ov.Node:
    return ops.convert(ops.constant(np.ones((CHANNELS, COLUMNS), np.int8)), ov.Type.f32)


OTHERS = {
    "groups of 16": lambda: ops.multiply(
        _integers(), ops.constant(np.repeat(np.arange(COLUMNS // 16, dtype=np.float32), 16)[None])
    ),
    "a scale a column": lambda: ops.multiply(_integers(), ops.constant(np.arange(COLUMNS, dtype=np.float32)[None])),
    "a zero point that is no integer": lambda: ops.multiply(
        ops.subtract(_integers(), ops.constant(np.float32(0.5))), ops.constant(np.float32(0.5))
    ),
    "plain floats": lambda: ops.constant(np.ones((CHANNELS, COLUMNS), np.float32)),
    "f16": lambda: ops.convert(ops.constant(np.ones((CHANNELS, COLUMNS), np.float16)), ov.Type.f32),
    "not a constant": lambda: ops.multiply(
        ops.convert(ops.parameter([CHANNELS, COLUMNS], np.int8), ov.Type.f32), ops.constant(np.float32(0.5))
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_products_stay(other: str, native: Path) -> None:
    x = ops.parameter([-1, COLUMNS], np.float32, name="x")
    weight = OTHERS[other]()
    inputs = [x]
    if other == "not a constant":
        inputs.append(weight.input_value(0).get_node().input_value(0).get_node())
    model = ov.Model([ops.matmul(x, weight, False, True).output(0)], inputs)
    assert lower_linear(model, native) == 0
    assert "MatMul" in {node.get_type_name() for node in model.get_ops()}
