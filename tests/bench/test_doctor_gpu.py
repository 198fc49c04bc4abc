"""What the doctor says of GPUs, from what their tools and packages say."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from bench.doctor_gpu import backends, find_gpus

OK = {"name": "x", "wanted": "", "version": "1", "state": "ok"}
ALL = {extra: [OK] for extra in ("core", "build", "tensorrt", "rtx")}


def gone(name: str) -> dict[str, str]:
    return {**OK, "name": name, "state": "is not installed"}


def gpu(capability: str | None) -> dict:
    device = {"name": "A GPU", "memory": "16 GiB", "driver": "580", "compute_capability": capability or ""}
    return {"devices": [device] if capability else [], "reason": ""}


def test_backends_by_packages_and_device() -> None:
    on_ada = backends(ALL, gpu("8.9"))
    assert on_ada["tensorrt_rtx"] == {"builds": True, "runs": True, "why": ""}
    assert on_ada["openvino"] == {"builds": True, "runs": True, "why": ""}
    hopper = backends(ALL, gpu("9.0"))["tensorrt_rtx"]
    assert (hopper["builds"], hopper["runs"]) == (True, False)
    assert "A GPU is SM90" in hopper["why"]
    whole = backends(ALL, gpu("9.0"))["tensorrt"]
    assert whole == {"builds": True, "runs": True, "why": "tried with a simulated library alone"}
    lacking = backends({**ALL, "tensorrt": [gone("tensorrt")]}, gpu("9.0"))["tensorrt"]
    assert lacking == {"builds": False, "runs": False, "why": f"lacks tensorrt, {whole['why']}"}
    assert not backends(ALL, gpu(None))["tensorrt"]["builds"]
    nothing = backends({**ALL, "rtx": [gone("cuda-python")]}, gpu(None))
    assert nothing["tensorrt_rtx"] == {"builds": True, "runs": False, "why": "lacks cuda-python, no NVIDIA GPU"}
    assert nothing["torch"] == {"builds": True, "runs": True, "why": "on the CPU alone"}
    bare = backends({**ALL, "build": [gone("torch")], "rtx": [gone("triton")]}, gpu("8.9"))
    assert not bare["tensorrt_rtx"]["builds"]
    assert bare["torch"]["why"] == "lacks torch"


def test_devices_are_what_the_drivers_tool_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034 MiB, 580.65.06, 8.9'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (device,) = find_gpus()["devices"]
    assert device == {
        "name": "NVIDIA L4", "memory": "23034 MiB", "driver": "580.65.06", "compute_capability": "8.9",
    }  # fmt: skip
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert find_gpus()["reason"] == "none (NVIDIA-SMI has failed)"


def test_each_library_has_a_line() -> None:
    libraries = find_gpus()["libraries"]
    assert list(libraries) == ["driver", "triton", "torch", "TensorRT-RTX", "TensorRT"]
    assert all(line and "\n" not in line for line in libraries.values())
    if not shutil.which("nvidia-smi"):
        assert "cuda-python" in libraries["driver"] or "no NVIDIA driver" in libraries["driver"]
    if importlib.util.find_spec("tensorrt") is None:
        assert libraries["TensorRT"].startswith("does not load (")
