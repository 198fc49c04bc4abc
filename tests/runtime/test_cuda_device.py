"""The calls to NVIDIA's driver, through the real cuda-python, over a stub of the driver on host memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.executors.segments.cuda import pack_arguments
from runtime.executors.segments.plan import Kernel

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def test_arguments_are_packed_by_their_types() -> None:
    kernel = Kernel((("x", "*fp16"), ("n", "i32"), ("y", "*i8")), num_warps=4)
    values, pointers = pack_arguments(kernel, (2**63 + 5, -7, 9))
    assert [ctypes.sizeof(value) for value in values] == [8, 4, 8]
    assert ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_uint64))[0] == 2**63 + 5
    assert ctypes.cast(pointers[1], ctypes.POINTER(ctypes.c_int32))[0] == -7
    with pytest.raises(ValueError, match="has 3 parameters, and 2 arguments"):
        pack_arguments(kernel, (1, 2))
    with pytest.raises(ValueError, match="n is 2147483648, which 32 bits do not hold"):
        pack_arguments(kernel, (1, 2**31, 3))


def test_every_call_is_one_that_the_bindings_take(tmp_path: Path) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("needs cuda-python (pip install 'plancast[rtx]')")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, SUPPORT / "driver_stub.c"], check=True)
    log = tmp_path / "launches"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path, "DRIVER_STUB_LOG": str(log)}
    command = [sys.executable, SUPPORT / "driver_probe.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *errors = done.stdout.splitlines()
    assert first == f"stub GPU SM89 58 {1 << 30}"
    assert log.read_text().splitlines() == [
        f"3,2,1 128,1,1 65536 {2**63 + 5} -7",
        "captured 1,1,1 128,1,1 65536 1 2",
    ]
    assert errors == [
        "stub GPU has no 1.0 TiB left (1.0 GiB are free): the NVIDIA driver failed in cuMemAlloc: out of memory",
        "n is 2147483648, which 32 bits do not hold",
        "the kernel has 2 parameters, and 1 arguments were given",
        f"{tmp_path}: the kernel k was compiled for SM90, and stub GPU is SM89",
        "GPU 3 does not exist: the driver has 1 (CUDA_VISIBLE_DEVICES hides others)",
        "the NVIDIA driver failed in cuModuleLoadData: a PTX JIT compilation failed",
    ]
