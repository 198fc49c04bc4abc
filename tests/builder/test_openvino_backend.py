"""The OpenVINO backend: what it writes, what it keeps compressed, what it refuses."""

from __future__ import annotations

import errno

import msgspec
import numpy as np
import onnx_ir as ir
import openvino as ov
import pytest
from openvino_engine import build_artifact, lowered, recipe, skip_unless_computed
from tiny_onnx import TinyOnnx

from builder.backends import openvino as backend
from builder.backends import openvino_compiled
from builder.recipe import BackendConfig, KvConfig, Recipe
from plugins import native
from runtime.errors import BuildError
from runtime.executors.openvino_model import OpenVINOEngine


@pytest.fixture(scope="module", autouse=True)
def _native_library():
    native.build_native()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writes_ir_and_blob_and_nothing_else(tmp_path):
    info = backend.compile_engine(TinyOnnx().model(), recipe(), tmp_path)
    assert files(tmp_path) == ["engine.bin", "engine.blob", "engine.xml"]
    assert (info.name, info.engine, info.blob) == ("openvino", "engine.xml", "engine.blob")
    assert info.version == ov.get_version()
    assert info.properties["INFERENCE_PRECISION_HINT"] == "f32"


def test_where_our_library_runs_everything_there_is_a_plan(tmp_path):
    tiny = TinyOnnx(weights="int8", rope="halves")
    info = backend.compile_engine(tiny.model(), recipe(weights="int8"), tmp_path)
    assert files(tmp_path) == ["engine.bin", "engine.plan", "engine.xml"]
    assert (info.plan, info.blob) == ("engine.plan", None)


def test_a_plan_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    notes = []
    progress = type("Progress", (), {"note": lambda _, line: notes.append(line)})()
    monkeypatch.setattr(openvino_compiled, "probe_plan", lambda graph: np.full((68, 97), np.nan, np.float32))
    info = backend.compile_engine(TinyOnnx(weights="int8").model(), recipe(weights="int8"), tmp_path, progress)
    assert (files(tmp_path), info.plan, info.blob) == (["engine.bin", "engine.xml"], None, None)
    assert [note for note in notes if "does not compute what the portable form does" in note] == notes != []


def test_a_recipe_can_do_without_the_blob(tmp_path):
    info = backend.compile_engine(TinyOnnx().model(), recipe(blob=False), tmp_path)
    assert (files(tmp_path), info.blob) == (["engine.bin", "engine.xml"], None)


def test_without_the_native_library_there_is_no_blob_and_a_note_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    notes = []

    class Progress:
        note = notes.append

        def update(self, task, done, total):
            pass

    folder = tmp_path / "engine"
    folder.mkdir()
    info = backend.compile_engine(TinyOnnx().model(), recipe(), folder, Progress())
    assert (files(folder), info.blob) == (["engine.bin", "engine.xml"], None)
    assert len(notes) == 1
    assert "no compiled form" in notes[0]


@pytest.mark.parametrize(("rope", "blob"), [(None, "engine.blob"), ("halves", "engine.blob"), ("interleaved", None)])
def test_a_blob_that_computes_something_else_is_not_kept(tmp_path, rope, blob):
    """OpenVINO 2026.4.1 loses what it knows of interleaved rotary tables when it writes a blob."""
    notes = []
    progress = type("Progress", (), {"note": lambda _, line: notes.append(line)})()
    info = backend.compile_engine(TinyOnnx(rope=rope).model(), recipe(), tmp_path, progress)
    assert info.blob == blob
    assert ("engine.blob" in files(tmp_path)) == bool(blob)
    assert [note for note in notes if "does not compute what the portable form does" in note] == notes
    assert bool(notes) != bool(blob)


def test_every_property_is_one_that_openvino_takes_and_keeps(tmp_path):
    """What the compiled model reports back is what was asked for; nothing was left to a default or dropped."""
    skip_unless_computed("bf16")
    asked = recipe("bf16", "int8", attention="openvino")
    backend.compile_engine(lowered(TinyOnnx(), asked), asked, tmp_path)
    properties = backend.engine_properties(asked)
    compiled = OpenVINOEngine(None, properties).compile_ir(tmp_path / "engine.xml")
    types = {"bf16": ov.Type.bf16, "u8": ov.Type.u8}
    for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"):
        assert compiled.get_property(name) == types[properties[name]]
    for name in ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE"):
        assert compiled.get_property(name) == int(properties[name])
    assert compiled.get_property("ENABLE_CPU_PINNING") is False
    assert compiled.get_property("NUM_STREAMS") == 1


@pytest.mark.parametrize(("weights", "stored"), [("f32", "f32"), ("bf16", "bf16"), ("int8", "i8")])
def test_weights_stay_as_stored(tmp_path, weights, stored):
    """In the IR, and in the compiled model: computing in f32 must not unpack bf16 or int8 matrices."""
    tiny = TinyOnnx(weights=weights, hidden=64, vocab_size=256)
    backend.compile_engine(tiny.model(), recipe(weights=weights, linear="openvino"), tmp_path)
    parameters = sum(value.size for value in tiny._values.values())
    width = {"f32": 4, "bf16": 2, "int8": 1}[weights]
    assert (tmp_path / "engine.bin").stat().st_size < parameters * width * 1.1 + 4096
    engine = OpenVINOEngine(native.find_native(), backend.engine_properties(recipe()))
    for compiled in (engine.compile_ir(tmp_path / "engine.xml"), engine.import_blob(tmp_path / "engine.blob")):
        inputs = [
            str(node.input_value(1).get_element_type().to_string())
            for node in compiled.get_runtime_model().get_ops()
            if "FullyConnected" in node.get_rt_info()["layerType"].astype(str)
        ]
        assert inputs
        assert set(inputs) == {stored}


@pytest.mark.parametrize(
    ("compute", "kv", "attention"),
    [(compute, kv, "openvino") for compute, kv in (("f32", "f16"), ("f32", "int8"), ("bf16", "bf16"), ("bf16", "int8"))]
    + [("f32", kv, "native") for kv in ("f32", "bf16", "int8", "int4", "fp8_e4m3", "int8:int4")],
)
def test_kv_layout_is_what_the_engine_has(tmp_path, compute, kv, attention):
    skip_unless_computed(compute)
    tiny = TinyOnnx(layers=3, attributes={"sliding_window": 40})
    asked = recipe(compute, kv, attention=attention)
    model = lowered(tiny, asked)
    layout = backend.kv_layout(model, asked)
    assert len(layout.layers) == 3
    assert layout.layers[0].sliding_window == 40
    backend.compile_engine(model, asked, tmp_path)
    properties = backend.engine_properties(asked, own_attention=attention == "native")
    compiled = OpenVINOEngine(native.find_native(), properties).compile_ir(tmp_path / "engine.xml")
    caches = [port for port in compiled.inputs if "_cache." in port.any_name]
    cells = [[dim.get_length() for dim in list(port.partial_shape)[1:]] for port in caches]
    block = sum(int(np.prod(shape)) * port.element_type.size for shape, port in zip(cells, caches, strict=True))
    assert block == layout.bytes_per_block


def test_skipped_layers_keep_16_bits(tmp_path):
    asked = msgspec.structs.replace(recipe("f32", "int4"), kv=KvConfig(key="int4", value="int4", skip_layers=(0, 2)))
    layers = backend.kv_layout(lowered(TinyOnnx(layers=3), asked), asked).layers
    assert [layer.key_dtype for layer in layers] == ["f16", "int4", "f16"]
    asked = msgspec.structs.replace(asked, kv=KvConfig(skip_layers=(3,)))
    with pytest.raises(BuildError, match=r"kv.skip_layers names 3, and the model has the layers 0\.\.2"):
        lowered(TinyOnnx(layers=3), asked)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"softcap": 30.0},
            "layer 0: attention logit softcap 30: OpenVINO's paged attention has no softcap; backend.att",
        ),
        ({"block_size": 16}, "layer 0: KV block size 16"),
    ],
)
def test_refuses_a_graph_that_openvino_cannot_compute(tmp_path, attributes, message):
    with pytest.raises(BuildError, match=message):
        backend.compile_engine(TinyOnnx(attributes=attributes).model(), recipe(attention="openvino"), tmp_path)
    assert files(tmp_path) == []


def test_without_the_native_library_what_only_it_can_do_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    with pytest.raises(BuildError, match=r"softcap 30.*\(our C\+\+ operators, which could, are not built here"):
        backend.compile_engine(TinyOnnx(attributes={"softcap": 30.0}).model(), recipe(), tmp_path)
    assert files(tmp_path) == []


def test_where_our_kernels_cannot_openvino_attends(tmp_path):
    """Both stand ready: a head that int8 kernels do not take is OpenVINO's, in the same recipe."""
    asked = recipe("f32", "int8")
    model = lowered(TinyOnnx(head_size=18), asked)
    assert not backend.uses_own_attention(model, asked)
    assert backend.uses_own_attention(lowered(TinyOnnx(), asked), asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": BackendConfig(compute="f16")}, "compute f16 is not computed"),
        ({"kv": KvConfig(key="bf16", value="bf16")}, "kv.key bf16 with kv.value bf16 .* in f32; .*: f32, f16, int8"),
        ({"kv": KvConfig(key="int8", value="f32")}, "kv.key int8 with kv.value f32"),
        ({"kv": KvConfig(block_size=16)}, "block_size 16"),
    ],
)
def test_refuses_dtypes_that_fail_only_at_the_first_step(tmp_path, changes, message):
    changes = {"backend": BackendConfig(attention="openvino"), **changes}
    with pytest.raises(BuildError, match=message):
        backend.compile_engine(TinyOnnx().model(), Recipe(name="tiny", model="tiny", **changes), tmp_path)
    assert files(tmp_path) == []


def test_an_operator_that_openvino_lacks_is_named(tmp_path):
    model = TinyOnnx().model()
    next(node for node in model.graph if node.op_type == "Add").op_type = "NoSuchOperator"
    with pytest.raises(BuildError, match="NoSuchOperator"):
        backend.compile_engine(model, recipe(), tmp_path)
    assert files(tmp_path) == []


def test_an_embedding_with_scales_a_column_is_refused(tmp_path):
    """OpenVINO would read past the end of the scales (measured: a corrupted heap)."""
    model = TinyOnnx(weights="int8").model()
    dequantize = next(node for node in model.graph if node.inputs[0].name == "embed")
    dequantize.attributes["axis"] = ir.AttrInt64("axis", 1)
    with pytest.raises(BuildError, match=r"embed\.f32: an embedding with scales along axis 1"):
        backend.compile_engine(model, recipe(), tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("method", ["compile", "import_blob"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, error, method):
    def stop(*_args):
        raise error

    monkeypatch.setattr(OpenVINOEngine, method, stop)
    with pytest.raises(type(error)):
        backend.compile_engine(TinyOnnx().model(), recipe(), tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_plan_leaves_nothing(tmp_path, monkeypatch, error):
    def stop(*_args):
        raise error

    monkeypatch.setattr(openvino_compiled, "read_plan", stop)
    with pytest.raises(type(error)):
        backend.compile_engine(TinyOnnx(weights="int8").model(), recipe(weights="int8"), tmp_path)
    assert files(tmp_path) == []


def test_the_artifact_opens(tmp_path):
    artifact = build_artifact(tmp_path / "tiny", TinyOnnx(), recipe())
    assert artifact.blob == artifact.path / "engine.blob"
    assert artifact.notes == ()
