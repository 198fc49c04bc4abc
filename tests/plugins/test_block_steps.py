"""Steps of `plancast::Block` against NumPy: biased products, norms of heads, GELU gates; and what heads leave."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from block_layer import F32, Layer, inputs, native_core
from linear_cases import make_weight
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from plugins.block.op import OP_TYPE, Columns, Program
from plugins.block.openvino import fuse_blocks
from plugins.linear.openvino import lower_linear
from plugins.linear.reference import reference
from plugins.native import build_native


@pytest.fixture(scope="module")
def core() -> ov.Core:
    return native_core()


def run(core: ov.Core, program: Program, x: NDArray[np.float32], constant: NDArray[np.float32]) -> NDArray[np.float32]:
    """The first output of a program over the rows `x`, with one constant."""
    factory = NodeFactory()
    factory.add_extension(str(build_native()))
    rows = ops.parameter([-1, x.shape[1]], np.float32, name="x")
    node = factory.create(OP_TYPE, [rows.output(0), ops.constant(constant).output(0)], {"program": program.text})
    return core.compile_model(ov.Model([node.output(0)], [rows]), "CPU", F32)({"x": x})[0]


@pytest.mark.parametrize(("heads", "size"), [(3, 32), (2, 5), (1, 7), (8, 128)])
def test_norms_of_heads_are_those_of_numpy(core: ov.Core, heads: int, size: int) -> None:
    rng = np.random.default_rng(size)
    x = (rng.standard_normal((300, heads * size + 3)) * 10.0 ** rng.integers(-2, 3, (300, 1))).astype(np.float32)
    gain = rng.standard_normal(size).astype(np.float32)
    program = Program([x.shape[1]])
    program.step("head_norm", program.value(heads * size, 0), Columns(0, 2, heads * size), 1, 1e-6, size)
    each = x[:, 2 : 2 + heads * size].astype(np.float64).reshape(300, heads, size)
    expected = each / np.sqrt((each**2).mean(-1, keepdims=True) + 1e-6) * gain
    for rows in (1, 300):
        got = run(core, program, x[:rows], gain)
        np.testing.assert_allclose(got, expected[:rows].reshape(rows, -1), rtol=1e-6)


def test_a_gelu_gate_is_that_of_numpy(core: ov.Core) -> None:
    x = (np.random.default_rng(0).standard_normal((300, 74)) * 4).astype(np.float32)
    x[:4, :37] = np.array([[0], [1e30], [-1e30], [-1e-30]], np.float32)
    program = Program([74])
    program.step("gelu_gate", program.value(37, 0), Columns(0, 0, 37), Columns(0, 37, 37))
    gate, up = x[:, :37].astype(np.float64), x[:, 37:].astype(np.float64)
    expected = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    got = run(core, program, x, np.zeros(1, np.float32))
    assert (np.abs(got - expected) <= 1e-6 * np.abs(gate * up)).all()


def test_a_product_with_bias_and_residual_has_the_bits_of_the_reference(core: ov.Core) -> None:
    weight = make_weight("int8", 70, 70, 0, exact_f16=False)
    rng = np.random.default_rng(1)
    x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((300, 70), 70))
    rows = ops.parameter([-1, 70], np.float32, name="x")
    scaled = ops.multiply(ops.convert(ops.constant(weight.values), ov.Type.f32), ops.constant(weight.scale))
    result = ops.add(rows, ops.add(ops.constant(bias), ops.matmul(rows, scaled, False, True)))
    model = ov.Model([result.output(0)], [rows])
    assert lower_linear(model, build_native()) == 1
    assert fuse_blocks(model, build_native()) == 1
    assert {node.get_type_name() for node in model.get_ops()} == {"Parameter", "Constant", "Block", "Result"}
    got = core.compile_model(model, "CPU", F32)({"x": x})[0]
    np.testing.assert_array_equal(got, x + reference(x, weight, "int16", bias))


class Heads(Layer):
    """A product whose heads are normed and turned, each used by something that no block computes, in its own shape."""

    def model(self) -> ov.Model:
        product = self.product(self.norm(self.x), 96 + 32, 96)
        query, rest = self.split(product, 96, 32)
        apart = self.norm(ops.reshape(query, ops.constant(np.array([-1, 3, 32])), False), 32)
        turned = self.rope(query, 3)
        odd = ops.cum_sum(ops.reshape(rest, ops.constant(np.array([-1, 2, 16])), False), np.int64(1))
        results = [ops.cum_sum(apart, np.int64(1)), ops.cum_sum(turned, np.int64(1)), odd]
        return ov.Model([result.output(0) for result in results], [self.x, self.cos, self.sin])


def test_what_others_use_of_heads_has_their_shape(core: ov.Core) -> None:
    model = Heads().model()
    assert lower_linear(model, build_native()) == 1
    assert fuse_blocks(model, build_native()) == 1
    plain, ours = core.compile_model(Heads().model(), "CPU", F32), core.compile_model(model, "CPU", F32)
    for rows in (1, 40):
        expected, got = plain(inputs(rows)), ours(inputs(rows))
        for index in range(3):
            assert got[index].shape == expected[index].shape
            assert np.abs(got[index] - expected[index]).max() <= 2e-3 * expected[index].std()
