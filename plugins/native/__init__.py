"""Builds and finds the shared library of our C++ operators.

It needs CMake and a C++17 compiler at build time; the headers come with the openvino package. Where either is missing
everything still works, from the portable form of an engine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent
_LIBRARY = "libplancast_native.so"
_BUNDLED = "lib"


class NativeBuildError(Exception):
    """The C++ operators cannot be built here; the message says why, and ends with the tools' own words."""


def native_folder() -> Path:
    """Where built libraries are kept: `native/` under $PLANCAST_HOME, by default ~/.cache/plancast."""
    return Path(os.environ.get("PLANCAST_HOME") or "~/.cache/plancast").expanduser().absolute() / "native"


def find_native() -> Path | None:
    """The library built from these very sources for the installed OpenVINO; None where there is none.

    One that was built here comes before the one that a wheel carries.
    """
    return next((path for path in (_library_path(), _bundled_path()) if path.is_file()), None)


def build_native() -> Path:
    """Build the library unless it is there (7 s on two cores), and return its path.

    Raises:
        NativeBuildError: no CMake, no C++ compiler, or the build failed.
    """
    found = find_native()
    if found is not None:
        return found
    library = _library_path()
    for tool in ("cmake", os.environ.get("CXX") or "c++"):
        if not shutil.which(tool):
            raise NativeBuildError(f"`{tool}` is not on the PATH: install CMake and a C++17 compiler")
    from openvino.utils import get_cmake_path

    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as build:
        _run(["cmake", "-S", str(SOURCE), "-B", build, f"-DOpenVINO_DIR={get_cmake_path()}"])
        # Without a number make starts every compiler at once: 3.8 GB.
        jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        _run(["cmake", "--build", build, "--config", "Release", "--parallel", jobs])
        os.replace(Path(build) / _LIBRARY, library)  # whole or not at all, whoever else builds
    return library


def bundle_native() -> Path:
    """Build the library and copy it among the sources, where a wheel takes it from; returns the copy.

    Raises:
        NativeBuildError: as `build_native`.
    """
    built, bundled = build_native(), _bundled_path()
    if built != bundled:
        shutil.rmtree(SOURCE / _BUNDLED, ignore_errors=True)
        bundled.parent.mkdir(parents=True)
        shutil.copyfile(built, bundled)
    return bundled


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        telling = [line for line in lines if "error:" in line.lower()] or lines
        raise NativeBuildError(f"`{' '.join(command[:2])}` failed: " + "\n".join(telling[:5]))


def _library_path() -> Path:
    return native_folder() / _key() / _LIBRARY


def _bundled_path() -> Path:
    return SOURCE / _BUNDLED / _key() / _LIBRARY


@cache
def _key() -> str:
    """Names what the library depends on: the OpenVINO version, the machine, and the sources."""
    from importlib.metadata import version

    sources = [
        *SOURCE.glob("*.cpp"),
        SOURCE / "CMakeLists.txt",
        *SOURCE.parent.glob("*/*.[ch]pp"),
        *SOURCE.parent.glob("*/*.inc"),
    ]
    digest = hashlib.sha256()
    for path in sorted(set(sources)):
        digest.update(path.relative_to(SOURCE.parent).as_posix().encode() + path.read_bytes())
    return f"openvino-{version('openvino')}-{platform.machine()}-{digest.hexdigest()[:12]}"
