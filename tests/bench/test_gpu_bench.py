"""The GPU benchmark on a machine without a GPU: its arguments, its refusal, its inputs and its table."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the benchmark needs triton (pip install 'plancast[triton]')")

from simulated_graph import SimulatedCapture  # noqa: E402
from tiny_families import open_tiny_checkpoint, write_tiny_checkpoint  # noqa: E402

from bench import gpu  # noqa: E402
from bench.gpu_checks import attention_error, checks  # noqa: E402
from bench.gpu_sizes import FULL, LlamaShape, Sizes  # noqa: E402
from bench.gpu_step import LlamaStep, llama_graph  # noqa: E402
from builder.passes import run_passes  # noqa: E402
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig  # noqa: E402
from builder.trace import trace  # noqa: E402
from plugins.paged_attention.kv_formats import KvFormat  # noqa: E402
from plugins.torch_engine.engine import TorchEngine  # noqa: E402

CPU = torch.device("cpu")
TINY_MODEL = LlamaShape(
    layers=2, hidden=32, intermediate=48, vocab=67, heads=4, kv_heads=2, head=8, block_size=16, kv="f32", theta=1e4,
    epsilon=1e-6,
)  # fmt: skip
TINY = Sizes(False, 1 << 16, (2, 1), (1, 33), (1, 40), (1, 20), (64, 128, 64), TINY_MODEL, (3, 20))


class SimulatedMachine(gpu.Machine):
    """A CPU: kernels interpreted, a stand-in for CUDA graphs, one run in place of a time."""

    def seconds(self, call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def capture(self):
        return SimulatedCapture()


# The interpreter multiplies the bits of bf16, so these compute in f16.
MACHINE = SimulatedMachine(CPU, 1e9, 1, TINY, "f16")


def test_list_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.MEASUREMENTS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(("arguments", "said"), [(["--only", "decod"], "decod"), (["--runs", "0"], "--runs is 0")])
def test_bad_arguments_are_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(arguments) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "measurements: checks" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.gpu needs an NVIDIA GPU: ")


def test_the_decode_inputs_are_sound() -> None:
    """The pages that are timed hold the keys and values that the check computes with (kernels interpreted)."""
    # In f16: the interpreter multiplies the bits of bf16.
    cpu = torch.device("cpu")
    decode = gpu.make_decode(cpu, "int8", sequences=2, context=33, heads=2, kv_heads=1, dtype=torch.float16)
    exact = gpu.exact_attention(decode)
    error = (decode.run().float() - exact).abs().max() / exact.std()
    assert error < gpu._BOUNDS["int8"]
    assert decode.bytes == 2 * 33 * 2 * (128 + 2)


def test_the_table_marks_what_was_missed() -> None:
    rows = [gpu.Row("a", "1 x", ">= 2", False), gpu.Row("long name", "3", ok=True, note="why")]
    assert gpu.table(rows).splitlines() == [
        "measurement  value  goal  reached  note",
        "a            1 x    >= 2  NO",
        "long name    3            yes      why",
    ]


GOALS = {
    "decode": {"decode f16": ">= 85%", "decode int8": ">= 1.6", "decode fp8_e4m3": ">= 1.8", "decode int4": ">= 3.0"},
    "torch": {"decode against SDPA": ">= 1.5", "decode against FlexAttention": ">= 1.5"},
    "prefill": {"prefill f16": ""},
    "products": {f"int4 product, {rows} rows": ">= 75%" for rows in (1, 4, 16)},
    "step": {"decode step, f16": ">= 70%"},
}


@pytest.mark.parametrize("name", GOALS)
def test_every_measurement_runs(name: str) -> None:
    """On a CPU, at tiny sizes: what is measured is right, each row has its goal, and none of speed is judged."""
    machine = MACHINE
    if name == "step":
        tiny = dataclasses.replace(TINY, model=dataclasses.replace(TINY_MODEL, kv="f16"))
        machine = dataclasses.replace(MACHINE, sizes=tiny)
    rows = list(gpu.MEASUREMENTS[name](machine))
    assert {row.name: row.goal for row in rows if not row.name.endswith("error")} == GOALS[name]
    for row in rows:
        assert row.ok is (True if row.name.endswith("error") else None), row


def test_a_wrong_result_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose replay differs from its launches misses its goal however fast it is."""
    run = LlamaStep.run
    calls = iter([0.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(LlamaStep, "run", lambda step: run(step) * (1 + 10 * next(calls)))
    sizes = dataclasses.replace(TINY, model=dataclasses.replace(TINY_MODEL, kv="f16"))
    (row,) = gpu.measure_step(dataclasses.replace(MACHINE, sizes=sizes))
    assert row.ok is False


def test_the_sizes_are_those_of_the_goals() -> None:
    assert FULL.measures_speed
    assert (FULL.decode, FULL.heads, FULL.step) == ((64, 8192), (64, 8), (64, 1024))
    assert FULL.model.matrix_elements == 7_504_658_432  # Llama-3-8B without its embedding, which is looked up
    judged = dataclasses.replace(MACHINE, sizes=FULL)
    assert (judged.reached(True), judged.reached(False)) == (True, False)


def test_the_kernels_are_checked_and_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(checks(CPU, torch.float16, "f16", every=False))
    assert len(found) > 15
    for name, error, bound in found:
        assert 0 <= error <= bound, name
    import bench.gpu_checks as module

    attend = module.attend_by_kernels
    monkeypatch.setattr(module, "attend_by_kernels", lambda *a: attend(*a) * 1.1)
    wrong = attention_error(CPU, torch.float16, KvFormat("int8"), {
        "num_heads": 2, "num_kv_heads": 1, "head_size": 32, "v_head_size": 32,
    })  # fmt: skip
    assert math.isfinite(wrong)
    assert wrong > 0.1


def test_the_steps_graph_is_the_builders(tmp_path: Path) -> None:
    """The operators that the passes leave of a Llama, and with its weights the same logits to the last bit."""
    write_tiny_checkpoint("llama", tmp_path)
    recipe = Recipe(
        name="tiny", model="tiny", backend=BackendConfig(name="torch"), weights=WeightsConfig(dtype="f32"),
        kv=KvConfig(key="f32", value="f32", block_size=16),
    )  # fmt: skip
    built = run_passes(trace(open_tiny_checkpoint(tmp_path), max_context_len=64), recipe)
    made = llama_graph(TINY_MODEL)
    assert [node.op_type for node in made.graph].count("RotaryEmbedding") == 4
    assert sorted(node.op_type for node in made.graph) == sorted(node.op_type for node in built.graph)
    named = {name: value.const_value for name, value in built.graph.initializers.items()}

    def weight(name: str, shape: tuple[int, ...]):
        tensor = named[name]
        assert tensor is not None
        array = np.array(tensor.numpy(), np.float32)
        assert array.shape == tuple(shape), name
        return torch.from_numpy(array)

    ir.save(built, tmp_path / "built.onnx")
    engines = [TorchEngine(tmp_path / "built.onnx"), TorchEngine(made, weights=weight)]
    feeds = {
        "input_ids": np.array([5, 9, 11, 30]), "position_ids": np.array([0, 1, 2, 0]),
        "past_lens": np.zeros(2, np.int32), "query_starts": np.array([0, 3, 4], np.int32),
        "block_ids": np.array([1, 0], np.int32), "block_starts": np.array([0, 1, 2], np.int32),
        "max_context_len": np.array(3, np.int32), "logits_rows": np.array([1, 2, 3]),
    }  # fmt: skip
    for engine in engines:
        engine.allocate(2)
    assert engines[0].block_bytes == engines[1].block_bytes
    expected, got = (engine.run(feeds) for engine in engines)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_benchmark_needs_nothing_of_the_server() -> None:
    """A GPU machine may have torch, triton and onnx-ir alone."""
    blocked = "import sys\nfor name in ('msgspec', 'openvino', 'yaml', 'transformers'): sys.modules[name] = None\n"
    used = "import bench.gpu, bench.gpu_step, bench.gpu_checks, plugins.torch_engine.graphs, runtime.philox\n"
    used += "import plugins.sampling.torch_kernel, plugins.paged_attention.torch_kernel"
    done = subprocess.run([sys.executable, "-c", blocked + used], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
