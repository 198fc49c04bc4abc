"""Every form of a quantized weight, on ONNX Runtime and on OpenVINO: the product with the dequantized weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import openvino as ov
import pytest
from numpy.typing import NDArray

from builder.passes.graph import Editor, dims
from builder.passes.matrices import ORIGINS, SIZES
from builder.passes.quantize_weights import QuantizeWeights
from builder.quantization.rounding import quantize
from builder.quantization.scheme import Scheme
from builder.recipe import Recipe, WeightOverride, WeightsConfig
from runtime.errors import BuildError
from zoo.quantized import QuantizedRef, QuantizedWeight, concatenate

VOCAB, HIDDEN, WIDE = 96, 64, 128
RNG = np.random.default_rng(0)
SHAPES = {"embed": (VOCAB, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
DENSE = {name: RNG.standard_normal(shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
IDS = np.array([3, 95, 0, 41, 3], np.int64)

SCHEMES = [
    Scheme(dtype, group, symmetric)
    for dtype, symmetric in (("int8", True), ("int8", False), ("int4", True), ("int4", False), ("fp8", True))
    for group in (None, 32, 64)
]


def graph() -> ir.Model:
    """ids -> embedding -> up -> down -> the embedding again, as the head."""
    inputs = [ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))]
    end = ir.Value(name="end", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", VOCAB]))
    model = ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": 23}), ir_version=10)
    last = ir.node("Identity", [inputs[0]])
    model.graph.append(last)
    editor = Editor(model)
    weights = {name: editor.initializer(name, ir.Tensor(array)) for name, array in DENSE.items()}
    x = editor.node(last, "Gather", [weights["embed"], inputs[0]], ("T", HIDDEN), dtype=ir.DataType.FLOAT)
    for name in ("up", "down", "embed"):
        rows, columns = SHAPES[name]
        turned = editor.node(last, "Transpose", [weights[name]], (columns, rows), attributes={"perm": [1, 0]})
        x = editor.node(last, "MatMul", [x, turned], ("T", rows))
    del end
    model.graph.remove(last)
    x.name = "logits"
    model.graph.outputs.append(x)
    return model


def expected(weights: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    x = weights["embed"][IDS]
    for name in ("up", "down", "embed"):
        x = x @ weights[name].T
    return x


def check(model: ir.Model, weights: dict[str, NDArray[np.float32]]) -> None:
    proto = ir.to_proto(model).SerializeToString()
    options = onnxruntime.SessionOptions()
    # Its higher levels replace a product of per-channel int8 by one with quantized activations.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    (on_ort,) = session.run(None, {"ids": IDS})
    core = ov.Core()
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    on_openvino = core.compile_model(core.read_model(proto), "CPU", properties)({"ids": IDS})[0]
    wanted = expected(weights)
    size = np.abs(wanted).max()
    np.testing.assert_allclose(on_ort, wanted, atol=2e-5 * size, err_msg="ONNX Runtime")
    np.testing.assert_allclose(on_openvino, wanted, atol=2e-5 * size, err_msg="OpenVINO")


def run(weights: WeightsConfig, quantized: dict[str, QuantizedRef] | None = None) -> ir.Model:
    model = graph()
    QuantizeWeights(quantized).run(model, Recipe(name="t", model="t", weights=weights))
    return model


def ref(weight: QuantizedWeight) -> QuantizedRef:
    return QuantizedRef(weight.format, weight.values.shape, lambda: weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounded_weights(scheme: Scheme) -> None:
    everything = WeightOverride(match="embed", dtype=scheme.dtype)  # type: ignore[arg-type]
    weights = WeightsConfig(
        dtype=scheme.dtype,  # type: ignore[arg-type]
        group_size=scheme.group or "channel",  # type: ignore[arg-type]
        symmetric=scheme.symmetric,
        overrides=(everything,),
    )
    if scheme.dtype == "fp8" and scheme.group:
        with pytest.raises(BuildError, match=r"embed is an embedding.*group_size: channel"):
            run(weights)
        return
    model = run(weights)
    check(model, {name: quantize(array, scheme).dequantize() for name, array in DENSE.items()})
    assert all(value.dtype != ir.DataType.FLOAT for value in model.graph.initializers.values() if value.name in DENSE)


def test_fp8_in_groups_keeps_its_table_by_channel() -> None:
    model = run(WeightsConfig(dtype="fp8", group_size=32))
    by_group, by_channel = Scheme("fp8", 32), Scheme("fp8")
    wanted = {name: by_channel if name == "embed" else by_group for name in DENSE}
    check(model, {name: quantize(DENSE[name], scheme).dequantize() for name, scheme in wanted.items()})


def test_an_int4_model_keeps_embedding_and_head_in_int8() -> None:
    model = run(WeightsConfig(dtype="int4"))
    stored = {name: model.graph.initializers[name].dtype for name in DENSE}
    assert stored == {"embed": ir.DataType.INT8, "up": ir.DataType.UINT4, "down": ir.DataType.UINT4}


def with_minima(weight: NDArray[np.float32], group: int) -> QuantizedWeight:
    """As GGUF's Q4_1: a scale and a minimum a group."""
    blocks = weight.reshape(weight.shape[0], -1, group)
    minimum = blocks.min(-1).astype(np.float16).astype(np.float32)
    scale = ((blocks.max(-1) - minimum) / 15).astype(np.float16).astype(np.float32)
    values = np.clip(np.rint((blocks - minimum[..., None]) / scale[..., None]), 0, 15)
    return QuantizedWeight("uint4", values.reshape(weight.shape).astype(np.uint8), scale, minimum=minimum)


def reordered(weight: NDArray[np.float32]) -> QuantizedWeight:
    """As GPTQ with activation order: groups of columns that do not lie side by side."""
    order = RNG.permutation(weight.shape[1]).astype(np.int64)
    found = quantize(weight[:, order], Scheme("int4", 32, False))
    return QuantizedWeight(found.kind, found.values, found.scale, found.zero, order=order)


@pytest.mark.parametrize(
    ("make", "tables"),
    [(lambda w: with_minima(w, 32), True), (lambda w: with_minima(w, 16), True), (reordered, False)],
    ids=["minima", "minima of groups of 16", "reordered"],
)
def test_what_checkpoints_bring(make: Callable[[NDArray[np.float32]], QuantizedWeight], tables: bool) -> None:
    stored = {name: make(array) for name, array in DENSE.items() if tables or name != "embed"}
    model = run(WeightsConfig(dtype="checkpoint"), {name: ref(weight) for name, weight in stored.items()})
    check(model, DENSE | {name: weight.dequantize() for name, weight in stored.items()})


def test_a_merged_weight_of_two_formats_is_taken_apart() -> None:
    first, second = DENSE["up"][:32], DENSE["up"][32:]
    stored = {"a": quantize(first, Scheme("int8", 32)), "b": with_minima(second, 32)}
    model = graph()
    value = model.graph.initializers["up"]
    value.metadata_props[ORIGINS], value.metadata_props[SIZES] = "a,b", "32,96"
    QuantizeWeights({name: ref(w) for name, w in stored.items()}).run(
        model, Recipe(name="t", model="t", weights=WeightsConfig(dtype="checkpoint"))
    )
    assert "up" not in model.graph.initializers
    assert {"a", "b"} <= set(model.graph.initializers)
    check(model, DENSE | {"up": np.concatenate([stored["a"].dequantize(), stored["b"].dequantize()])})


def test_a_merged_weight_of_one_format_stays_one() -> None:
    parts = [quantize(part, Scheme("int4", 32, False)) for part in (DENSE["up"][:32], DENSE["up"][32:])]
    model = graph()
    value = model.graph.initializers["up"]
    value.metadata_props[ORIGINS], value.metadata_props[SIZES] = "a,b", "32,96"
    refs = {name: ref(part) for name, part in zip("ab", parts, strict=True)}
    QuantizeWeights(refs).run(model, Recipe(name="t", model="t", weights=WeightsConfig(dtype="checkpoint")))
    assert dims(model.graph.initializers["up"]) == (WIDE, HIDDEN)
    check(model, DENSE | {"up": concatenate(parts).dequantize()})
