"""Our TensorRT plugins against the real `tensorrt.plugin` module, over stub libraries and without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.gpu.aot import with_parameters, without_scratch

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tensorrt_bindings", "tensorrt_rtx_libs", "triton")
T, B, HEADS, KV_HEADS, SIZE = 13, 3, 8, 2, 64  # as in tensorrt_probe.py


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the probe prints. TensorRT's own libraries are not on the index; those of TensorRT-RTX have the symbols."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or shutil.which("cc") is None:
        pytest.skip(f"needs {', '.join(missing) or 'a C compiler'} (pip install 'plancast[test]')")
    folder = tmp_path_factory.mktemp("stubs")
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.submodule_search_locations
    libraries = Path(spec.submodule_search_locations[0])
    (folder / "libnvinfer.so.11").symlink_to(libraries / "libtensorrt_rtx.so.1")
    (folder / "libnvonnxparser.so.11").symlink_to(libraries / "libtensorrt_onnxparser_rtx.so.1")
    source = folder / "plugin.c"
    source.write_text("int initLibNvInferPlugins(void *logger, const char *space) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvinfer_plugin.so.11", source], check=True)
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "tensorrt_probe.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_outputs_and_aliases(told: dict) -> None:
    """TensorRT is told the right shapes, and that the written caches are the ones that came in."""
    assert told["WriteKV"]["aliased"] == [True, True]
    assert told["Attend"]["outputs"] == [[T, HEADS * SIZE]]
    assert told["AttendSplits"]["outputs"] == [[4, T, HEADS, SIZE], [4, T, HEADS, 2]]
    assert told["AttendSplits"]["dtypes"] == ["FLOAT", "FLOAT"]
    assert told["MergeSplits"]["outputs"] == [[T, HEADS * SIZE]]
    assert told["MergeSplits"]["dtypes"] == ["HALF"]


def test_kernels_take_what_tensorrt_passes(told: dict) -> None:
    """Inputs, lengths, outputs, and nothing else: TensorRT fills no other parameter."""
    for name, plugin in told.items():
        lengths = ["u32"] * len(plugin["lengths"])
        assert plugin["parameters"] == ["u64"] * plugin["inputs"] + lengths + ["u64"] * len(plugin["outputs"]), name
        assert plugin["assembles"], name


def test_python_launches_them_too(told: dict) -> None:
    """For development: the same inputs and attributes, the outputs, a stream, and the tactic where there are some."""
    assert all(plugin["python"] for plugin in told.values())
    assert {name for name, plugin in told.items() if plugin["python_tactic"]} == {"Attend", "AttendSplits"}


def test_tactics(told: dict) -> None:
    """TensorRT may choose how many keys a tile of attention has."""
    types = ["HALF", "INT8", "INT8", *["INT32"] * 4, "HALF", "HALF"]
    assert told["Attend"]["tactics"] == [[[1, 2, 3], [*types, "HALF"]]]
    assert told["AttendSplits"]["tactics"] == [[[1, 2, 3], [*types, "FLOAT", "FLOAT"]]]
    assert told["WriteKV"]["tactics"] == told["MergeSplits"]["tactics"] == []


def test_launches(told: dict) -> None:
    assert (told["WriteKV"]["grid"], told["WriteKV"]["lengths"]) == ([T, KV_HEADS, 1], [B])
    tiles = T // (16 // (HEADS // KV_HEADS)) + B
    assert (told["Attend"]["grid"], told["Attend"]["lengths"]) == ([tiles, KV_HEADS, 1], [T, B])
    assert told["AttendSplits"]["grid"] == [tiles, KV_HEADS, 4]
    assert (told["MergeSplits"]["grid"], told["MergeSplits"]["lengths"]) == ([T * HEADS, 1, 1], [T * HEADS])
    assert {name: plugin["threads"] for name, plugin in told.items()} == {
        "WriteKV": 32, "Attend": 128, "AttendSplits": 128, "MergeSplits": 128,
    }  # fmt: skip


PTX = """
.visible .entry kernel(
\t.param .u64 .ptr .global .align 16 kernel_param_0,
\t.param .u32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2
)
{
\tld.param.b64 %rd1, [kernel_param_0];
\tret;
}
"""


def test_parameters_change_places() -> None:
    """A kernel takes what it reads under other names and in another order, unused addresses between."""
    names = ["a", "n", "b"]
    changed = with_parameters(
        PTX.replace("ret;", "ld.param.b64 %rd2, [kernel_param_2];\n\tret;"), names, ["n", None, "a"], {"b": "a"}
    )
    header, body = changed.split("{")
    assert [line.split()[-1].rstrip(",") for line in header.splitlines() if ".param" in line] == [
        "kernel_param_1", "unused_1", "kernel_param_0",
    ]  # fmt: skip
    assert "%rd2, [kernel_param_0]" in body
    with pytest.raises(RuntimeError, match="uses a parameter that is not passed"):
        with_parameters(PTX, names, ["n"], {})


def test_scratch_parameters_go_where_they_are_not_used() -> None:
    cut = without_scratch(PTX, 2)
    assert "kernel_param_1\n)" in cut
    assert "kernel_param_2" not in cut
    with pytest.raises(RuntimeError, match="uses scratch memory"):
        without_scratch(PTX.replace("[kernel_param_0]", "[kernel_param_2]"), 2)
    with pytest.raises(RuntimeError, match="has 3 parameters, and 4 are passed"):
        without_scratch(PTX, 4)
