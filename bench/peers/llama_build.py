"""llama.cpp from the source that llama-cpp-python vendors: fetched and compiled once, kept beside the environments.

An interrupted compilation goes on where it stopped: neither source nor objects lie in the environment's folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

from bench.peers.environments import PeerError, peers_folder, run
from zoo.progress import Progress
from zoo.store import locked

VERSION = "0.3.36"  # of llama-cpp-python
_TARGETS = ("llama-server", "llama-batched-bench", "llama-quantize")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_LOAD = "_tile_loadconfig(&tc);"
_BARRIER = 'asm volatile("" : : "r"(&tc) : "memory");'
# As ninja and make count: [12/220], [ 5%].
_STEP = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")


def folder() -> Path:
    return peers_folder() / f"llama.cpp-{VERSION}"


def source() -> Path:
    """llama.cpp's source tree."""
    return folder() / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"


def program(name: str) -> Path:
    """Where one of its programs lies."""
    return folder() / "build" / "bin" / name


def ensure_programs(environment: Path, progress: Progress) -> None:
    """Fetch the source and compile the programs where one is missing: about 20 minutes on two cores, once.

    cmake and ninja are the system's, or those of the virtual environment `environment`. Raises `PeerError`.
    """
    if all(program(name).exists() for name in _TARGETS):
        return
    with locked(folder().name, progress):
        _compile(environment, progress)


def _compile(environment: Path, progress: Progress) -> None:
    _fetch(environment / "bin" / "python", progress)
    mend_amx(source() / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{environment / 'bin'}"
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if cmake is None:
        raise PeerError("cannot compile llama.cpp: there is no cmake; install one, such as by `pip install cmake`")
    build = folder() / "build"
    configure = [cmake, "-S", str(source()), "-B", str(build), *_OPTIONS]
    if ninja is not None and not (build / "Makefile").exists():
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    progress.update("configuring llama.cpp", 0, None)
    run(configure, "configure llama.cpp", environment={"PATH": path})
    progress.note("compiling llama.cpp: about 20 minutes on two cores, once")

    def step(line: str) -> None:
        if found := _STEP.match(line):
            progress.update("compiling llama.cpp", int(found[1]), int(found[2] or 100))

    command = [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1), "--target", *_TARGETS]
    run(command, "compile llama.cpp", on_line=step, environment={"PATH": path})


def mend_amx(amx: Path) -> None:
    """Keep GCC 12 from dropping the tiles' configuration, whose load it takes for a read of 8 bytes of 64.

    Without this, llama.cpp ends with an illegal instruction at its first product where the processor has AMX.
    """
    if not amx.exists():
        return
    text = amx.read_text()
    if _BARRIER not in text:
        amx.write_text(text.replace(_LOAD, f"{_BARRIER}\n    {_LOAD}"))


def _fetch(python: Path, progress: Progress) -> None:
    if source().is_dir():
        return
    progress.update("fetching llama.cpp's source", 0, None)
    download = [str(python), "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    # Only itself from source: what its build requires may come as wheels.
    wanted = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}", "--dest", str(folder())]
    run([*download, *wanted], "fetch llama.cpp's source")
    archive = folder() / f"llama_cpp_python-{VERSION}.tar.gz"
    part = folder() / "part"
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(part, filter="data")
    (part / archive.name.removesuffix(".tar.gz")).rename(source().parents[1])
    part.rmdir()
    archive.unlink()
