"""Plans: the bits of the lowered graph on OpenVINO, whatever the model; and the file that stores one."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
import pytest
from native_library import require_native
from openvino_engine import lowered, recipe, skip_unless_computed
from tiny_families import open_tiny_checkpoint, write_tiny_checkpoint
from tiny_onnx import TinyOnnx

from builder.backends.openvino import ENGINE, compile_engine, engine_properties
from builder.backends.openvino_probe import probe, probe_plan
from builder.passes import run_passes
from builder.recipe import Recipe
from builder.trace import trace
from plugins.block import plan as plan_module
from plugins.block.native import NativeGraph
from plugins.block.plan import Constant, Input, LookUp, Output, PlanError, PlanMaker, read_plan
from plugins.block.plan_openvino import ModelPlan, UnknownOperationError
from plugins.native import build_native, find_native
from runtime.executors.openvino_model import OpenVINOEngine

require_native()

# Known whole, or with the operation that only OpenVINO runs.
FAMILIES = (
    "llama",
    "llama-tied-bias",
    "llama3-rope",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "olmo2",
)
OTHERS = ("qwen2_moe", "gpt2", "cohere2")
FORMATS = ("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8:int4")


def lowered_model(folder: Path, asked: Recipe) -> tuple[OpenVINOEngine, ov.Model]:
    engine = OpenVINOEngine(find_native(), engine_properties(asked, own_attention=True), own_linear=True)
    return engine, engine.read_ir(folder / ENGINE)


def of_family(family: str, folder: Path, asked: Recipe) -> tuple[OpenVINOEngine, ov.Model]:
    write_tiny_checkpoint(family, folder / "model", max_position_embeddings=128)
    graph = run_passes(trace(open_tiny_checkpoint(folder / "model"), max_context_len=128), asked)
    compile_engine(graph, asked, folder)
    return lowered_model(folder, asked)


def same_bits(engine: OpenVINOEngine, model: ov.Model) -> None:
    made = ModelPlan(model)
    planned = made.maker.planned(made.plan)
    np.testing.assert_array_equal(probe_plan(NativeGraph(build_native(), planned)), probe(engine.compile(model)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "compute"), [("int8", "f32"), ("bf16", "f32"), ("bf16", "bf16")])
def test_every_family_gives_openvinos_bits(family: str, weights: str, compute: str, tmp_path: Path) -> None:
    skip_unless_computed(compute)
    asked = recipe(compute, kv="int8", weights=weights, attention="native", blob=False)
    same_bits(*of_family(family, tmp_path, asked))


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_name_what_only_openvino_runs(family: str, tmp_path: Path) -> None:
    asked = recipe(kv="int8", weights="int8", attention="native", blob=False)
    _, model = of_family(family, tmp_path, asked)
    with pytest.raises(UnknownOperationError, match=r"\w+ \w+"):
        ModelPlan(model)


@pytest.mark.parametrize("kv", FORMATS)
def test_every_kv_format_gives_openvinos_bits(kv: str, tmp_path: Path) -> None:
    tiny = TinyOnnx(layers=3, context=400, weights="int8", rope="halves", attributes={"sliding_window": 50})
    asked = recipe(kv=kv, weights="int8", attention="native", blob=False)
    compile_engine(lowered(tiny, asked), asked, tmp_path)
    same_bits(*lowered_model(tmp_path, asked))


def stored(folder: Path) -> Path:
    """A plan that looks rows up in one table, and takes 64 + 24 bytes of constants."""
    maker, path = PlanMaker(), folder / "x.plan"
    scales = maker.constant(np.arange(3, dtype=np.float32).reshape(3, 1), "f32")
    table = maker.constant(np.arange(24, dtype=np.int8).reshape(3, 8), "i8")
    plan = maker.plan([Input("input_ids", 0)], [LookUp(0, table, scales)], [Output(1, 8)])
    maker.write(plan, path)
    return path


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    plan, constants = read_plan(stored(tmp_path))
    (step,) = plan.steps
    assert isinstance(step, LookUp)
    assert (step.table.begin, step.table.end, plan.constants) == (64, 88, 88)
    assert constants.ctypes.data % 64 == 0
    assert constants[64:].tolist() == list(range(24))
    assert constants[:12].view(np.float32).tolist() == [0, 1, 2]
    assert not constants[12:64].any()


def damaged(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> str:
    """Damage the file as `what` says; returns what its reader should say."""
    data = path.read_bytes()
    if what == "cut":
        path.write_bytes(data[:-1])
        return r"has \d+ bytes, and \d+ were written"
    if what == "empty":
        path.write_bytes(b"")
        return "not a plan"
    if what == "other":
        path.write_bytes(b"<net>" + data[5:])
        return "not a plan"
    if what == "format":
        path.write_bytes(data[:8] + struct.pack("<I", 9) + data[12:])
        return "of format 9, and this plancast reads format 1"
    if what == "header":
        path.write_bytes(data[:26] + b"\xc1" * 9 + data[35:])
        return "its header is damaged"
    if what == "gone":
        path.unlink()
        return "cannot be read"
    monkeypatch.setattr(plan_module, "VERSION", 99)
    return r"version 1 of the C\+\+ blocks, and this plancast has 99"


@pytest.mark.parametrize("what", ["cut", "empty", "other", "format", "header", "gone", "version"])
def test_a_file_that_does_not_fit_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path)
    with pytest.raises(PlanError, match=f"x.plan: .*{damaged(path, monkeypatch, what)}"):
        read_plan(path)


def test_a_step_that_reads_what_is_not_there_is_refused(tmp_path: Path) -> None:
    plan, _ = read_plan(stored(tmp_path))
    (step,) = plan.steps
    assert isinstance(step, LookUp)
    far = Constant(80, "i8", (3, 8))
    for changes in (
        {"steps": (msgspec.structs.replace(step, ids=1),)},
        {"steps": (msgspec.structs.replace(step, table=far),)},
        {"outputs": (Output(2, 8),)},
    ):
        maker = PlanMaker()
        maker.constant(np.zeros(plan.constants, np.int8), "i8")
        maker.write(msgspec.structs.replace(plan, **changes), tmp_path / "y.plan")
        with pytest.raises(PlanError, match=r"y\.plan: a (step|result)"):
            read_plan(tmp_path / "y.plan")


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = PlanMaker()
    plan = maker.plan([], [LookUp(0, maker.constant(np.zeros((1, 1), np.int8), "i8"))], [])
    monkeypatch.setattr(maker, "_arrays", [None])
    with pytest.raises(TypeError):
        maker.write(plan, tmp_path / "x.plan")
    assert not list(tmp_path.iterdir())
