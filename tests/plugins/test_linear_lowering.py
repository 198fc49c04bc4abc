"""Products with int8 weights in an OpenVINO model become `Linear`, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from plugins.linear.openvino import lower_linear
from plugins.linear.reference import reference

CHANNELS, COLUMNS = 48, 40


@pytest.fixture(scope="module")
def native() -> Path:
    from plugins.native import NativeBuildError, build_native

    try:
        return build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, (CHANNELS, COLUMNS), dtype=np.int8)
    return values, rng.random(CHANNELS).astype(np.float32) / 100


def dequantized(values: np.ndarray, scale: np.ndarray, form: str) -> ov.Node:
    """`values * scale` as the front end leaves it (`reshaped`), or as folding does."""
    converted = ops.convert(ops.constant(values), ov.Type.f32)
    column = ops.constant(scale.reshape(-1, 1))
    if form == "reshaped":
        column = ops.reshape(ops.constant(scale), ops.constant(np.array([-1, 1])), False)
    if form == "zero_point":
        converted = ops.subtract(converted, ops.constant(np.full((CHANNELS, 1), 3, np.float32)))
    if form == "one scale a column":
        column = ops.constant(np.ones((1, COLUMNS), np.float32))
    return ops.multiply(converted, column)


def model(form: str, *, transpose_node: bool) -> ov.Model:
    x = ops.parameter([-1, COLUMNS], np.float32, name="x")
    weight = dequantized(*weights(), form)
    if transpose_node:
        product = ops.matmul(x, ops.transpose(weight, ops.constant(np.array([1, 0]))), False, False)
    else:
        product = ops.matmul(x, weight, False, True)
    product.output(0).set_names({"y"})
    return ov.Model([product.output(0)], [x])


@pytest.mark.parametrize("form", ["folded", "reshaped"])
@pytest.mark.parametrize("transpose_node", [True, False])
def test_int8_products_are_lowered(form: str, transpose_node: bool, native: Path) -> None:
    core = ov.Core()
    core.add_extension(str(native))
    lowered = model(form, transpose_node=transpose_node)
    assert lower_linear(lowered, native) == 1
    assert "MatMul" not in {node.get_type_name() for node in lowered.get_ops()}
    x = np.random.default_rng(1).standard_normal((5, COLUMNS)).astype(np.float32)
    result = core.compile_model(lowered, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"x": x})["y"]
    np.testing.assert_array_equal(result, reference(x, *weights()))


@pytest.mark.parametrize("form", ["zero_point", "one scale a column"])
def test_other_products_stay(form: str, native: Path) -> None:
    untouched = model(form, transpose_node=False)
    assert lower_linear(untouched, native) == 0
    assert "MatMul" in {node.get_type_name() for node in untouched.get_ops()}


def test_the_lowered_model_survives_ir_and_blob(native: Path, tmp_path: Path) -> None:
    core = ov.Core()
    core.add_extension(str(native))
    lowered = model("reshaped", transpose_node=True)
    lower_linear(lowered, native)
    ov.save_model(lowered, tmp_path / "m.xml", compress_to_fp16=False)
    config = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(tmp_path / "m.xml"), "CPU", config)
    x = np.random.default_rng(2).standard_normal((3, COLUMNS)).astype(np.float32)
    expected = reference(x, *weights())
    np.testing.assert_array_equal(compiled({"x": x})["y"], expected)
    imported = core.import_model(compiled.export_model().getvalue(), "CPU", config)
    np.testing.assert_array_equal(imported({"x": x})["y"], expected)
