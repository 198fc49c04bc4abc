"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and the thread pool under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
CHECKS = ROOT / "tests" / "native"
COMPILER = os.environ.get("CXX") or "c++"
COMMON = ("-std=c++17", "-ffp-contract=off", "-w", "-I", str(PLUGINS))


def build(folder: Path, name: str, sources: list[Path], *flags: str) -> Path:
    """Compile `sources` into an executable, two at a time."""
    if not shutil.which(COMPILER):
        pytest.skip("there is no C++ compiler")

    def compiled(source: Path) -> str:
        target = folder / f"{name}-{source.parent.name}-{source.stem}.o"
        command = [COMPILER, *COMMON, *flags, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / name
    done = subprocess.run(
        [COMPILER, *flags, *objects, "-o", str(program), "-lpthread"], capture_output=True, text=True, check=False
    )
    if done.returncode and "sanitize" in " ".join(flags) and "cannot find" in done.stderr:
        pytest.skip("the compiler's sanitizers are not installed")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path) -> None:
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_kernels_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    sources = [
        CHECKS / "kernels_check.cpp",
        CHECKS / "attention_check.cpp",
        *sorted(PLUGINS.glob("*/isa_*.cpp")),
        PLUGINS / "linear" / "kernel.cpp",
        PLUGINS / "block" / "graph.cpp",
        PLUGINS / "block" / "program.cpp",
        PLUGINS / "block" / "run.cpp",
        PLUGINS / "paged_attention" / "kernel.cpp",
        PLUGINS / "native" / "pool.cpp",
    ]
    run(build(tmp_path, "kernels", sources, "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))


def test_the_pool_under_the_thread_sanitizer(tmp_path: Path) -> None:
    sources = [CHECKS / "pool_check.cpp", PLUGINS / "native" / "pool.cpp"]
    run(build(tmp_path, "pool", sources, "-O1", "-g1", "-fsanitize=thread"))


def test_the_pool_sleeps_when_idle_and_survives_a_fork(tmp_path: Path) -> None:
    sources = [CHECKS / "pool_check.cpp", PLUGINS / "native" / "pool.cpp"]
    run(build(tmp_path, "pool", sources, "-O2", "-DCHECK_IDLE"))
