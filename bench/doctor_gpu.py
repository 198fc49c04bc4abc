"""What `plancast doctor` says of NVIDIA GPUs: devices, libraries, and which backends can build and run engines here."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from typing import Any

from plugins.gpu.architectures import RTX_CAPABILITIES
from runtime.errors import PlancastError

Packages = dict[str, list[dict[str, str]]]


def find_gpus() -> dict[str, Any]:
    """Devices by the driver's own tool, and the state of each library that engines for them need."""
    return {**_devices(), "libraries": _libraries()}


def _devices() -> dict[str, Any]:
    if not shutil.which("nvidia-smi"):
        return {"devices": [], "reason": "none (no nvidia-smi)"}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"devices": [], "reason": f"none (nvidia-smi: {error})"}
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    devices = [
        dict(zip(("name", "memory", "driver", "compute_capability"), row, strict=True)) for row in rows if len(row) == 4
    ]
    return {"devices": devices, "reason": "" if devices else f"none ({(done.stdout + done.stderr).strip()[:120]})"}


def _libraries() -> dict[str, str]:
    """One line a library: its version, or why it does not load."""
    return {
        "driver": _driver(),
        "triton": _version("triton"),
        "torch": _torch(),
        "TensorRT-RTX": _version("tensorrt_rtx_bindings"),
        "TensorRT": _version("tensorrt"),
    }


def _driver() -> str:
    from runtime.executors.segments.cuda import call, load_driver

    try:
        version = call(load_driver(), "cuDriverGetVersion")
    except PlancastError as error:
        return str(error)
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _version(module: str) -> str:
    try:
        return str(importlib.import_module(module).__version__)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"does not load ({str(error).splitlines()[0][:100]})"


def _torch() -> str:
    try:
        from plugins.torch_engine import device
    except ImportError:
        return "is not installed"
    return device.missing("CUDA") or "sees a GPU"


def backends(packages: Packages, gpu: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Which backends can build and run engines here, and why not."""

    def absent(extra: str) -> str:
        return ", ".join(package["name"] for package in packages[extra] if package["state"] != "ok")

    openvino = not any(package["name"] == "openvino" and package["state"] != "ok" for package in packages["core"])
    lacking = absent("build")
    no_gpu = "" if gpu["devices"] else "no NVIDIA GPU"
    found = {
        "openvino": _state(openvino and not lacking, openvino, ["" if openvino else "lacks openvino", _lacks(lacking)]),
        "torch": _state(
            not lacking, not lacking, [_lacks(lacking), "on the CPU alone" if no_gpu and not lacking else ""]
        ),
    }
    rtx = absent("rtx")
    unfit = "" if no_gpu else _unfit(gpu["devices"][0])
    # Kernels and engines are built by triton and TensorRT-RTX; cuda-python only runs them.
    builds = [n for n in rtx.split(", ") if n and not n.startswith("cuda-")]
    found["tensorrt_rtx"] = _state(
        not builds and not lacking, not rtx and not no_gpu and not unfit, [_lacks(rtx), _lacks(lacking), no_gpu, unfit]
    )
    trt = absent("tensorrt")
    found["tensorrt"] = _state(
        not trt and not lacking and not no_gpu,
        not trt and not no_gpu,
        [_lacks(trt), _lacks(lacking), no_gpu, "tried with a simulated library alone"],
    )
    return found


def _state(builds: bool, runs: bool, reasons: list[str]) -> dict[str, Any]:
    return {"builds": builds, "runs": runs, "why": ", ".join(dict.fromkeys(filter(None, reasons)))}


def _lacks(names: str) -> str:
    return f"lacks {names}" if names else ""


def _unfit(device: dict[str, str]) -> str:
    architecture = f"SM{device['compute_capability'].replace('.', '')}"
    if architecture in RTX_CAPABILITIES:
        return ""
    return f"{device['name']} is {architecture}, which TensorRT-RTX has no engines for"
