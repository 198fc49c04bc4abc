"""A model run by the C++ library alone: each step against NumPy, a whole model against OpenVINO."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from block_layer import F32, HIDDEN, Layer, native_core
from openvino import opset13 as ops

from plugins.block.native import NativeGraph
from plugins.block.op import Columns, Program
from plugins.block.openvino import fuse_blocks
from plugins.block.plan import (
    Angles,
    Block,
    Input,
    Join,
    LookUp,
    Norm,
    Output,
    PlanError,
    PlanMaker,
    Scale,
    Step,
    Take,
)
from plugins.block.plan_openvino import ModelPlan, UnknownOperationError
from plugins.linear.openvino import lower_linear
from plugins.native import build_native


@pytest.fixture(scope="module")
def core() -> ov.Core:
    return native_core()


def run(graph: NativeGraph, inputs: list[np.ndarray], rows: int, threads: int = 1) -> list[Any]:
    for place, array in enumerate(inputs):
        graph.set_input(place, array, len(array))
    outputs = [np.full((rows + 1, output.width), 7.0, np.float32) for output in graph.plan.outputs]
    for place, array in enumerate(outputs):
        graph.set_output(place, array)
    graph.run(threads)
    assert all((array[rows] == 7.0).all() for array in outputs), "written beyond the last row"
    return [array[:rows] for array in outputs]


def graph_of(maker: PlanMaker, widths: list[int], steps: list[Step], outputs: list[tuple[int, int]]) -> NativeGraph:
    inputs = [Input(f"input {place}", width) for place, width in enumerate(widths)]
    plan = maker.plan(inputs, steps, [Output(*output) for output in outputs])
    return NativeGraph(build_native(), maker.planned(plan))


def test_steps_are_those_of_numpy(core: ov.Core) -> None:
    rng, maker = np.random.default_rng(0), PlanMaker()
    x, floats = rng.standard_normal((9, 6)).astype(np.float32), rng.standard_normal((20, 5)).astype(np.float32)
    whole, scales = rng.integers(-127, 128, (20, 4), np.int8), rng.random((20, 2)).astype(np.float32)
    halves = floats.view(np.uint32) >> 16
    gain, ids = rng.standard_normal(6).astype(np.float32), np.array([3, 19, 0, 3], np.int64) % 9
    steps = [
        Norm(0, maker.constant(gain, "f32"), 1e-5),  # 2
        LookUp(1, maker.constant(floats, "f32")),
        LookUp(1, maker.constant(whole, "i8"), maker.constant(scales, "f32")),
        LookUp(1, maker.constant(halves.astype(np.uint16), "bf16")),
        Take(2, 1),  # 6
        Join((3, 4, 6)),
        Scale(6, -0.3),
    ]
    graph = graph_of(maker, [6, 0], steps, [(2, 6), (3, 5), (4, 4), (5, 5), (6, 6), (7, 15), (8, 6)])
    got = run(graph, [x, ids], 9)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(got[1][:4], floats[ids])
    np.testing.assert_array_equal(got[2][:4], whole[ids] * scales[ids].repeat(2, axis=1))
    np.testing.assert_array_equal(got[3][:4], (halves << 16).astype(np.uint32).view(np.float32)[ids])
    np.testing.assert_array_equal(got[4][:4], got[0][ids])
    np.testing.assert_array_equal(got[5][:4], np.concatenate([got[1][:4], got[2][:4], got[4][:4]], 1))
    np.testing.assert_array_equal(got[6][:4], got[4][:4] * np.float32(-0.3))


def test_angles_are_those_of_positions(core: ov.Core) -> None:
    maker = PlanMaker()
    frequencies = (10000.0 ** (-np.arange(5) / 5)).astype(np.float32)
    stored = maker.constant(frequencies, "f32")
    graph = graph_of(maker, [0], [Angles(0, stored, sine=False), Angles(0, stored, sine=True)], [(1, 5), (2, 5)])
    for positions in (np.array([7]), np.arange(131_000, 131_072), np.array([0, 3, 1 << 20])):
        cos, sin = run(graph, [positions], len(positions), threads=2)
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
        np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)


def test_a_block_reads_values_and_constants(core: ov.Core) -> None:
    program, maker = Program([4, 4]), PlanMaker()
    program.step("add", program.value(4, 1), Columns(0, 0, 4), Columns(1, 0, 4))
    program.step("norm", program.value(4, 0), Columns(2, 0, 4), 2, 1e-5)
    program.constants([64])
    constants = np.zeros(80, np.uint8)
    constants[64:] = np.array([1, 2, 3, 4], np.float32).view(np.uint8)
    step = Block(program.text, (1, 0), maker.constant(constants, "u8"), 2)
    graph = graph_of(maker, [4, 4], [step], [(3, 4), (2, 4)])
    rng = np.random.default_rng(1)
    for rows in (1, 3, 300, 2, 0):
        x, y = (rng.standard_normal((rows, 4)).astype(np.float32) for _ in range(2))
        total, normed = run(graph, [x, y], rows, threads=2)
        np.testing.assert_array_equal(total, y + x)
        expected = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-5) * np.arange(1, 5)
        np.testing.assert_allclose(normed, expected, rtol=2e-6)
    with pytest.raises(PlanError, match="dance"):
        graph_of(maker, [4], [Block("input 4;value 4 0;dance 1 0 0 4", (0,), None, 1)], [(1, 4)])


class Small(Layer):
    """Embedding and states, normed and joined; a product; cosines by position; the rows that say something."""

    def __init__(self, *, odd: bool = False):
        super().__init__(3)
        self.odd = odd
        self.ids, self.positions, self.chosen = (
            ops.parameter([-1], np.int64, name=name) for name in ("input_ids", "position_ids", "logits_rows")
        )

    def model(self) -> ov.Model:
        embedding = ops.gather(self.weight(50, HIDDEN), self.ids, np.int64(0))
        x = self.product(ops.concat([self.norm(embedding), self.norm(self.x)], 1), HIDDEN, 2 * HIDDEN)
        angle = ops.convert(ops.reshape(self.positions, ops.constant(np.array([-1, 1])), False), ov.Type.f32)
        x = ops.add(x, ops.cos(ops.multiply(angle, ops.constant(self.rng.random((1, HIDDEN)).astype(np.float32)))))
        if self.odd:
            x = ops.cum_sum(x, np.int64(0))
        rows = ops.gather(x, self.chosen, np.int64(0))
        result = self.product(self.norm(ops.add(rows, self.product(self.norm(rows), HIDDEN, HIDDEN))), 40, HIDDEN)
        return ov.Model([result.output(0), rows.output(0)], [self.x, self.ids, self.positions, self.chosen])


def lowered(model: ov.Model) -> ov.Model:
    lower_linear(model, build_native())
    assert fuse_blocks(model, build_native()) == 2
    return model


def test_a_model_computes_what_openvino_does(core: ov.Core) -> None:
    made = ModelPlan(lowered(Small().model()))
    graph = NativeGraph(build_native(), made.maker.planned(made.plan))
    assert [output.width for output in graph.plan.outputs] == [40, HIDDEN]
    compiled = core.compile_model(lowered(Small().model()), "CPU", F32)
    rng = np.random.default_rng(0)
    for rows in (1, 2, 300):
        given: dict[str, np.ndarray] = {
            "x": rng.standard_normal((rows, HIDDEN)).astype(np.float32),
            "input_ids": rng.integers(0, 50, rows),
            "position_ids": np.arange(70, 70 + rows),
            "logits_rows": np.arange(rows)[-(1 + rows // 2) :],
        }
        expected = compiled(given)
        got = run(graph, [given[each.name] for each in graph.plan.inputs], len(given["logits_rows"]), threads=2)
        for index in range(2):
            assert np.abs(got[index] - expected[index]).max() <= 2e-3 * expected[index].std()


def test_what_only_openvino_runs_is_named(core: ov.Core) -> None:
    model = Small(odd=True).model()
    lower_linear(model, build_native())
    fuse_blocks(model, build_native())
    with pytest.raises(UnknownOperationError, match="CumSum"):
        ModelPlan(model)
