"""`plancast doctor`: what this machine has, what can be built and run here, what is missing and what that costs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from bench.doctor_gpu import backends, find_gpus
from bench.machine import describe_machine, measure_limits
from plugins.native import find_native
from runtime.memory import available_memory, format_size
from runtime.version import __version__

# What lies in each extra of pyproject.toml is read from the installed distribution; these are what each is for.
EXTRAS = {
    "": "serve an artifact on a CPU",
    "build": "build artifacts",
    "triton": "compile and run the kernels for NVIDIA GPUs",
    "tensorrt": "build and run TensorRT engines",
    "rtx": "build and run TensorRT for RTX engines",
    "otel": "send traces to an OTLP collector",
    "test": "run the tests",
}


def examine(progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything that the report says, as plain values."""
    progress("packages")
    packages = {extra or "core": _packages(extra) for extra in EXTRAS}
    gpu = find_gpus()
    progress("the C++ operators")
    native = _native()
    progress("the machine's own limits")
    library = Path(native["library"]) if native["library"] else None
    cores = len(os.sched_getaffinity(0))
    limits = measure_limits(library, cores, rounds=3)
    machine = {
        **describe_machine(),
        "usable_cores": cores,
        "free_memory_bytes": available_memory().bytes,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "read_bytes_per_s": limits.read_bytes,
        "int8_ops_per_s": limits.int8_ops,
        "bf16_ops_per_s": limits.bf16_ops,
    }
    report = {"plancast": __version__, "machine": machine, "native": native, "gpu": gpu, "packages": packages}
    report["backends"] = backends(packages, gpu)
    report["missing"] = _missing(report)
    return report


def print_report(report: dict[str, Any]) -> None:
    """The report for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    machine, native, gpu = report["machine"], report["native"], report["gpu"]
    table.add_row("plancast", f"{report['plancast']} on {machine['system']}")
    table.add_row("processor", f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores usable")
    table.add_row("", ", ".join(machine["isa"]) or "instruction sets unknown")
    memory = f"{format_size(machine['memory_bytes'])}, {format_size(machine['free_memory_bytes'])} of them free"
    table.add_row("memory", f"{memory}; reads {machine['read_bytes_per_s'] / 1e9:.1f} GB/s")
    peaks = [
        f"{machine[f'{kind}_ops_per_s'] / 1e9:.0f} GOPS {kind}"
        for kind in ("int8", "bf16")
        if machine[f"{kind}_ops_per_s"]
    ]
    if peaks:
        table.add_row("arithmetic", ", ".join(peaks))
    table.add_row(
        "C++ operators", f"{native['isa']} kernels, {native['library']}" if native["library"] else "not built"
    )
    table.add_row("compiler", f"{native['compiler'] or 'none'}; {native['cmake'] or 'no CMake'}")
    if gpu["devices"]:
        for device in gpu["devices"]:
            architecture = f"SM{device['compute_capability'].replace('.', '')}"
            table.add_row("GPU", f"{device['name']} ({architecture}), {device['memory']}, driver {device['driver']}")
    else:
        table.add_row("GPU", gpu["reason"])
    for name, state in gpu["libraries"].items():
        table.add_row("" if name != "driver" else "for NVIDIA GPUs", escape(f"{name}: {state}"))
    for name, backend in report["backends"].items():
        can = [word for word, yes in (("builds", backend["builds"]), ("runs", backend["runs"])) if yes]
        why = f"; {backend['why']}" if backend["why"] else ""
        table.add_row(f"backend {name}", (" and ".join(can) or "neither builds nor runs") + why)
    for extra, found in report["packages"].items():
        absent = [f"{package['name']} {package['state']}" for package in found if package["state"] != "ok"]
        good = f"all {len(found)} packages fit"
        table.add_row(f"packages: {extra}", good if not absent else "; ".join(absent))
    console.print(table, highlight=False)
    if not report["missing"]:
        console.print("Nothing is missing.")
    for entry in report["missing"]:
        console.print(f"missing: {entry['what']}. Costs: {entry['cost']}. Mend: {entry['mend']}", highlight=False)


def _packages(extra: str) -> list[dict[str, str]]:
    """Each requirement of an extra ("": the core) with what is installed."""
    try:
        texts = metadata.requires("plancast") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        mine = marker is None or marker.evaluate({"extra": extra})
        if not mine or (extra and (marker is None or marker.evaluate({"extra": ""}))):
            continue
        wanted = str(requirement.specifier)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.append({"name": requirement.name, "wanted": wanted, "version": "", "state": "is not installed"})
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        state = "ok" if fits else f"is {version}, not {wanted}"
        found.append({"name": requirement.name, "wanted": wanted, "version": version, "state": state})
    return found


def _native() -> dict[str, Any]:
    """The library of C++ operators, and what builds it."""
    compiler = os.environ.get("CXX") or "c++"
    library = find_native()
    isa = None
    if library is not None:
        from plugins.linear.native import available_isas

        isa = available_isas(library)[0]
    return {
        "library": str(library) if library else None,
        "isa": isa,
        "compiler": _first_line(compiler, "--version"),
        "cmake": _first_line("cmake", "--version"),
    }


def _first_line(*command: str) -> str | None:
    """The first line that a program prints; None where there is no such program."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _missing(report: dict[str, Any]) -> list[dict[str, str]]:
    """What a CPU user would want and does not have."""
    missing = []
    native, machine = report["native"], report["machine"]
    if not native["library"]:
        missing.append(
            {
                "what": "the library of C++ operators",
                "cost": "int8 and int4 steps take OpenVINO's own operators, about half as fast, and each load compiles "
                "the portable form (seconds rather than 0.3 s); KV formats beyond OpenVINO's are refused",
                "mend": ("" if native["compiler"] and native["cmake"] else "install CMake and a C++17 compiler, then ")
                + "`python -m plugins.native`",
            }
        )
    x86 = platform.machine() in ("x86_64", "AMD64")
    if native["library"] and x86 and not {"avx512_vnni", "avx_vnni"} & set(machine["isa"]):
        missing.append(
            {
                "what": "VNNI in this processor",
                "cost": f"products run on {native['isa']}: right to the bit, at about half of the arithmetic speed",
                "mend": "a processor with AVX-512 VNNI or AVX-VNNI",
            }
        )
    if not report["backends"]["openvino"]["builds"]:
        missing.append(
            {
                "what": "what building needs",
                "cost": "artifacts can be served here, not built",
                "mend": "pip install 'plancast[build]'",
            }
        )
    return missing
