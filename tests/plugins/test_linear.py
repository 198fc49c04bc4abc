"""`plancast::Linear`: layout, reference and kernels, on every instruction set of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.linear.op import activation_levels, pack_weight, unpack_weight
from plugins.linear.reference import reference

ROOT = Path(__file__).resolve().parents[2]
# (output channels, columns): whole strips, odd tails of both, one column, one channel, deep sums.
SHAPES = [(64, 64), (33, 7), (1, 1), (31, 2), (96, 577), (40, 4096)]
ROWS = (1, 2, 5, 8, 9, 17)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing_round_trips(channels: int, columns: int, seed: int) -> None:
    weight = np.random.default_rng(seed).integers(-128, 128, (channels, columns), dtype=np.int8)
    packed = pack_weight(weight)
    assert packed.shape == (-(-channels // 32), -(-columns // 2), 32, 2)
    np.testing.assert_array_equal(unpack_weight(packed, channels, columns), weight)


@pytest.mark.parametrize("columns", [1, 2, 576, 1536, 4096, 28672])
def test_no_sum_can_overflow(columns: int) -> None:
    assert 1 <= activation_levels(columns) <= 32767
    assert activation_levels(columns) * 128 * columns < 2**31


@pytest.mark.parametrize(("channels", "columns"), SHAPES)
def test_reference_is_near_the_product(channels: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((6, columns)).astype(np.float32)
    weight = rng.integers(-127, 128, (channels, columns), dtype=np.int8)
    scale = rng.random(channels).astype(np.float32) / 100
    exact = x.astype(np.float64) @ (weight * scale[:, None].astype(np.float64)).T
    # Half a level of each activation, times the weight, summed: the bound of rounding.
    step = np.abs(x).max(axis=1, keepdims=True) / activation_levels(columns)
    bound = 0.51 * step * np.abs(weight * scale[:, None]).sum(axis=1) + 1e-5 * np.abs(exact).max() + 1e-6
    assert (np.abs(reference(x, weight, scale) - exact) <= bound).all()


def test_reference_rows_of_zeros_and_not_finite() -> None:
    x = np.ones((4, 8), np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 5] = -np.inf
    y = reference(x, np.ones((3, 8), np.int8), np.ones(3, np.float32), np.full(3, 2, np.float32))
    np.testing.assert_array_equal(y[0], 2)
    assert np.isnan(y[1:3]).all()
    np.testing.assert_allclose(y[3], 10, rtol=1e-3)


def _cases(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for i, (channels, columns) in enumerate(SHAPES):
        arrays[f"w{i}"] = rng.integers(-128, 128, (channels, columns), dtype=np.int8)
        arrays[f"s{i}"] = rng.random(channels).astype(np.float32)
        arrays[f"b{i}"] = rng.standard_normal(channels).astype(np.float32)
        for rows in ROWS:
            x = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(10.0) ** rng.integers(-30, 30)
            if rows > 4:
                x[1] = 0
                x[2, columns // 2] = np.nan
                x[3, 0] = np.inf
            arrays[f"x{i}.{rows}"] = x
    return arrays


# Runs the operation on what an .npz holds, on the threads and instruction set that the environment names.
_WORKER = """
import json, sys
import numpy as np, openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory
from plugins.linear.op import pack_weight
from plugins.native import find_native
source, target, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
cases, results = np.load(source), {}
core = ov.Core(); core.add_extension(str(find_native()))
factory = NodeFactory(); factory.add_extension(str(find_native()))
config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
for name in sorted(key for key in cases if key.startswith("x")):
    i = name[1:].split(".")[0]
    x = ops.parameter([-1, cases[name].shape[1]], np.float32)
    inputs = [x, *(ops.constant(a) for a in (pack_weight(cases["w" + i]), cases["s" + i], cases["b" + i]))]
    model = ov.Model([factory.create("Linear", [node.output(0) for node in inputs]).output(0)], [x])
    results[name] = core.compile_model(model, "CPU", config)(cases[name])[0]
np.savez(target, **results)
"""


@pytest.mark.parametrize(("isa", "threads"), [("avx512_vnni", 1), ("avx512_vnni", 2), ("avx2", 2), ("portable", 2)])
def test_kernels_equal_the_reference_to_the_bit(isa: str, threads: int, tmp_path: Path) -> None:
    """Integer sums leave no room: every instruction set and every number of threads gives the same bits."""
    from plugins.native import NativeBuildError, build_native

    try:
        build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    cases = _cases(seed=7)
    np.savez(tmp_path / "cases.npz", **cases)
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "cases.npz"), str(tmp_path / "results.npz"), str(threads)]
    environment = {**os.environ, "PLANCAST_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    assert len(results.files) == len(SHAPES) * len(ROWS)
    for name in results.files:
        i = name[1:].split(".")[0]
        expected = reference(cases[name], cases[f"w{i}"], cases[f"s{i}"], cases[f"b{i}"])
        np.testing.assert_array_equal(results[name], expected, err_msg=json.dumps([isa, threads, name]))
