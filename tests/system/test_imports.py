"""The arrows between the rooms (design: plancast.py -> bench -> builder -> runtime -> plugins, builder -> zoo)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bench", "builder", "runtime", "plugins", "zoo")
ALLOWED = {
    "bench": {"bench", "builder", "runtime", "plugins", "zoo"},
    "builder": {"builder", "runtime", "plugins", "zoo"},
    "runtime": {"runtime", "plugins"},
    "plugins": {"plugins"},
    "zoo": {"zoo", "runtime.errors", "runtime.memory"},
}
# What serving must not need, and what the bookkeeping must not know.
FORBIDDEN_IN_RUNTIME = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "gguf"}
TENSOR_LIBRARIES = {"numpy", "torch", "openvino"}
PURE = ("block_pool.py", "prefix_cache.py", "sequence.py", "scheduler.py", "swap.py")
PURE += ("scheduling/kv_manager.py", "scheduling/spill.py", "scheduling/waiting_queue.py")


def imports(path: Path) -> set[str]:
    """Every module that the file imports, at any depth, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_run_one_way(room: str) -> None:
    assert sources(room), f"no sources in {room}/"
    for path in sources(room):
        for name in imports(path):
            if name.split(".")[0] in ROOMS:
                allowed = any(name == entry or name.startswith(entry + ".") for entry in ALLOWED[room])
                assert allowed, f"{path.relative_to(ROOT)} imports {name}"
            assert name != "plancast", f"{path.relative_to(ROOT)} imports the front door"


def test_runtime_needs_no_build_library() -> None:
    for path in sources("runtime"):
        found = {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IN_RUNTIME
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize("name", PURE)
def test_bookkeeping_knows_no_tensor_library(name: str) -> None:
    path = ROOT / "runtime" / name
    found = {name.split(".")[0] for name in imports(path)} & TENSOR_LIBRARIES
    assert not found, f"{path.name} imports {found}"


def test_op_schemas_import_light() -> None:
    """plugins/*/op.py may not pull in torch, onnx or a vendor library when imported."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "plugins").glob("*/op.py")]
    assert modules
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "onnx", "openvino", "tensorrt", "triton"} & set(loaded.split())


def test_command_line_imports_nothing_heavy() -> None:
    """`plancast --help` answers at once because no command imports its engine before it runs."""
    code = "import plancast, sys; plancast._make_app(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"torch", "transformers", "onnx", "openvino", "numpy", "fastapi", "uvicorn", "huggingface_hub", "zmq"}
    assert not heavy & set(loaded.split())
