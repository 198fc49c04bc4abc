"""`plancast::Block`: a decoder layer's rows in one operation compute what OpenVINO's own operators do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from block_layer import F32, Layer, inputs, native_core

from plugins.block.openvino import fuse_blocks
from plugins.linear.openvino import lower_linear

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def core() -> ov.Core:
    return native_core()


def fused(core: ov.Core) -> ov.Model:
    from plugins.native import build_native

    model = Layer().model()
    assert lower_linear(model, build_native()) == 9
    assert fuse_blocks(model, build_native()) == 3
    return model


def test_a_layer_in_blocks_computes_the_same(core: ov.Core) -> None:
    model = fused(core)
    left = {node.get_type_name() for node in model.get_ops()}
    assert not left & {"Linear", "MatMul", "Sigmoid", "Gelu", "Sqrt", "Slice", "VariadicSplit"}
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
sys.path[:0] = ["tests/support", "tests/plugins"]
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
