"""`plancast::Block`: a decoder layer's rows in one operation compute what OpenVINO's own operators do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from plugins.block.openvino import fuse_blocks
from plugins.linear.openvino import lower_linear

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, SIZE, INNER = 96, 3, 32, 160
F32 = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


@pytest.fixture(scope="module")
def core() -> ov.Core:
    from plugins.native import NativeBuildError, build_native

    try:
        library = build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    core = ov.Core()
    core.add_extension(str(library))
    return core


class Layer:
    """Two decoder layers with something in the middle that no block computes (a cumulative sum over the rows)."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.x = ops.parameter([-1, HIDDEN], np.float32, name="x")
        self.cos, self.sin = (ops.parameter([-1, 1, 1, SIZE], np.float32, name=name) for name in ("cos", "sin"))

    def weight(self, channels: int, columns: int) -> ov.Node:
        values = ops.constant(self.rng.integers(-127, 128, (channels, columns), dtype=np.int8))
        scale = ops.constant((self.rng.random((channels, 1)) * 0.3 / columns**0.5 / 64).astype(np.float32))
        return ops.multiply(ops.convert(values, ov.Type.f32), scale)

    def product(self, x: ov.Node | ov.Output, channels: int, columns: int) -> ov.Node:
        return ops.matmul(x, self.weight(channels, columns), False, True)

    def biased(self, product: ov.Node, channels: int) -> ov.Node:
        return ops.add(product, ops.constant(self.rng.standard_normal(channels).astype(np.float32)))

    def norm(self, x: ov.Node) -> ov.Node:
        mean = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2))), ops.constant(np.array([-1])), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(1e-5))))
        gain = ops.constant((1 + self.rng.random(HIDDEN)).astype(np.float32))
        return ops.multiply(ops.multiply(x, ops.power(root, ops.constant(np.float32(-1)))), gain)

    def rope(self, x: ov.Output, heads: int) -> ov.Node:
        def ends(number: int) -> ov.Node:
            return ops.constant(np.array([number]))

        shaped = ops.reshape(x, ops.constant(np.array([-1, heads, 1, SIZE])), False)
        second = ops.slice(shaped, ends(SIZE // 2), ends(SIZE), ends(1), ends(-1))
        first = ops.slice(shaped, ends(0), ends(SIZE // 2), ends(1), ends(-1))
        turned = ops.concat([ops.negative(second), first], -1)
        total = ops.add(ops.multiply(shaped, self.cos), ops.multiply(turned, self.sin))
        return ops.reshape(total, ops.constant(np.array([-1, heads * SIZE])), False)

    def split(self, x: ov.Node, *widths: int) -> list[ov.Output]:
        return ops.variadic_split(x, ops.constant(np.int64(-1)), ops.constant(np.array(widths))).outputs()

    def model(self) -> ov.Model:
        x: ov.Node = self.x
        for _ in range(2):
            joined = self.biased(self.product(self.norm(x), HIDDEN + SIZE, HIDDEN), HIDDEN + SIZE)
            query, value = self.split(joined, HIDDEN, SIZE)
            mixed = ops.cum_sum(ops.add(self.rope(query, HEADS), ops.constant(np.float32(0.5))), np.int64(0))
            mixed = ops.concat([mixed, value], -1)
            x = ops.add(x, self.product(mixed, HIDDEN, HIDDEN + SIZE))
            gate, up = self.split(self.product(self.norm(x), 2 * INNER, HIDDEN), INNER, INNER)
            active = ops.multiply(ops.multiply(gate, ops.sigmoid(gate)), up)
            x = ops.add(x, self.biased(self.product(active, HIDDEN, INNER), HIDDEN))
        result = self.product(self.norm(x), 40, HIDDEN)
        result.output(0).set_names({"y"})
        return ov.Model([result.output(0), x.output(0)], [self.x, self.cos, self.sin])


def inputs(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    angle = rng.random((rows, 1, 1, SIZE // 2)).astype(np.float32)
    angle = np.concatenate([angle, angle], -1)
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    return {"x": x, "cos": np.cos(angle), "sin": np.sin(angle)}


def fused(core: ov.Core) -> ov.Model:
    from plugins.native import build_native

    model = Layer().model()
    assert lower_linear(model, build_native()) == 9
    assert fuse_blocks(model, build_native()) == 3
    return model


def test_a_layer_in_blocks_computes_the_same(core: ov.Core) -> None:
    model = fused(core)
    left = {node.get_type_name() for node in model.get_ops()}
    assert not left & {"Linear", "MatMul", "Sigmoid", "Sqrt", "Slice", "VariadicSplit"}
    for node in model.get_ops():
        if node.get_type_name() == "Block":
            kinds = [value.get_node().get_type_name() for value in node.input_values()]
            assert kinds.count("Constant") == 1, "each input of a node costs time at each step"
    plain, ours = core.compile_model(Layer().model(), "CPU", F32), core.compile_model(model, "CPU", F32)
    for rows in (1, 7, 300):
        expected, got = plain(inputs(rows)), ours(inputs(rows))
        for index in range(2):
            assert np.abs(got[index] - expected[index]).max() <= 2e-3 * expected[index].std()


def test_blocks_survive_ir_and_blob(core: ov.Core, tmp_path: Path) -> None:
    model = fused(core)
    ov.save_model(model, tmp_path / "m.xml", compress_to_fp16=False)
    compiled = core.compile_model(model, "CPU", F32)
    expected = compiled(inputs(5))["y"]
    again = core.compile_model(core.read_model(tmp_path / "m.xml"), "CPU", F32)
    imported = core.import_model(compiled.export_model().getvalue(), "CPU", F32)
    for other in (again, imported):
        np.testing.assert_array_equal(other(inputs(5))["y"], expected)


def test_rows_have_the_same_bits_in_any_batch_and_on_any_threads(core: ov.Core) -> None:
    model = fused(core)
    whole = core.compile_model(model, "CPU", {**F32, "INFERENCE_NUM_THREADS": "1"})(inputs(300))["y"]
    ours = core.compile_model(model, "CPU", {**F32, "INFERENCE_NUM_THREADS": "2"})
    np.testing.assert_array_equal(ours(inputs(300))["y"], whole)
    for rows in (1, 5, 8):
        part = {name: array[:rows] for name, array in inputs(300).items()}
        np.testing.assert_array_equal(ours(part)["y"], whole[:rows])


_WORKER = """
import sys
import numpy as np, openvino as ov
sys.path.insert(0, "tests/plugins")
from test_block import F32, fused, inputs
from plugins.native import find_native
core = ov.Core(); core.add_extension(str(find_native()))
np.save(sys.argv[1], core.compile_model(fused(core), "CPU", F32)(inputs(9))["y"])
"""


def test_every_instruction_set_gives_the_same_bits(core: ov.Core, tmp_path: Path) -> None:
    expected = core.compile_model(fused(core), "CPU", F32)(inputs(9))["y"]
    for isa in ("avx512_vnni", "avx2", "portable"):
        environment = {**os.environ, "PLANCAST_ISA": isa, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _WORKER, str(tmp_path / f"{isa}.npy")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        np.testing.assert_array_equal(np.load(tmp_path / f"{isa}.npy"), expected)
