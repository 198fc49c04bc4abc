"""An artifact: the folder that holds one compiled engine and everything that serving it needs.

`Artifact.open` checks before anything is loaded, so that a damaged, incomplete or foreign engine is refused with what
to do about it. It needs no network and no source model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import pkgutil
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

import plugins
from runtime.errors import ArtifactError
from runtime.hardware import this_machine
from runtime.manifest import MANIFEST_NAME, FileInfo, Manifest, decode_manifest, rebuild_hint

# The distribution whose version decides whether a backend's engine loads.
BACKEND_DISTRIBUTIONS = {
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "tensorrt_rtx": "tensorrt-rtx-cu13-bindings",
    "torch": "torch",
}


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact that passed its checks.

    Attributes:
        path: its folder, absolute, links resolved.
        manifest: the facts about it.
        notes: lines for a person about what works less well here, such as a compiled form that is for another CPU.
        is_head: it is the part of an artifact that drafts (`draft_head`).
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()
    is_head: bool = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: Literal["quick", "full"] = "quick") -> Artifact:
        """Check the artifact at `path` and return it.

        `quick` checks the manifest, its format version, every file's presence and size, the versions of our plugins
        and of the backend, and the hardware. `full` also hashes every file (about a second for 2 GB).

        Raises:
            ArtifactError: what is wrong, where, and the command that rebuilds.
        """
        folder = Path(path).expanduser()
        manifest = read_manifest(folder)
        folder = folder.resolve()
        hint = rebuild_hint(manifest.name)
        check_files(folder, manifest.files, full=verify == "full", hint=hint)
        _check_backend(manifest, hint)
        _check_plugins(manifest, hint)
        return cls(folder, manifest, _check_hardware(manifest, hint))

    def file(self, name: str) -> Path:
        """The path of the file `name`. Raises `ArtifactError` where the manifest does not list it."""
        path = self.optional_file(name)
        if path is None:
            raise ArtifactError(f"{self.path}: holds no {name}; {rebuild_hint(self.manifest.name)}")
        return path

    def optional_file(self, name: str) -> Path | None:
        """The path of the file `name`, or None where the manifest does not list it."""
        return self.path / name if name in self.manifest.files else None

    def draft_head(self) -> Artifact | None:
        """The same artifact seen as that of its head's engine; None where it has none."""
        head = self.manifest.draft_head
        if head is None:
            return None
        manifest = msgspec.structs.replace(
            self.manifest, name=head.name, backend=head.backend, kv=head.kv, plugins=head.plugins, draft_head=None
        )
        return Artifact(self.path, manifest, self.notes, is_head=True)

    @property
    def plan(self) -> Path | None:
        """The compiled form that our C++ library runs alone, on any CPU of the architecture, where there is one."""
        name = self.manifest.backend.plan
        return None if name is None else self.file(name)

    @property
    def blob(self) -> Path | None:
        """OpenVINO's compiled form, where there is one and this machine's CPU is the one it was compiled for."""
        name = self.manifest.backend.blob
        if name is None or missing_isa(self.manifest):
            return None
        return self.file(name)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the artifact in `folder`, decoded and checked in itself, whatever the state of its files.

    Raises:
        ArtifactError: no artifact there, or its manifest is damaged.
    """
    if not folder.exists():
        raise ArtifactError(f"{folder}: no such artifact; build one: plancast build RECIPE --out {folder}")
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: not a folder, so not an artifact; build one: plancast build RECIPE")
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder}: holds no {MANIFEST_NAME}, so it is not an artifact or not a whole one; "
            "build one: plancast build RECIPE"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return decode_manifest(data)
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from None


def check_files(folder: Path, files: dict[str, FileInfo], *, full: bool, hint: str) -> None:
    """Check that each of `files` lies in `folder` with its size and, where `full`, its SHA-256.

    Raises:
        ArtifactError: the first file that is missing, is a link, or is not what was written.
    """
    for name, info in files.items():
        if not is_plain_name(name):
            raise ArtifactError(f"{folder}: the manifest lists {name!r}, which is no plain file name; {hint}")
        try:
            status = os.lstat(folder / name)
        except OSError as error:
            raise ArtifactError(f"{folder}: {name} is missing ({error.strerror}); {hint}") from None
        if not stat.S_ISREG(status.st_mode):
            # A link would make the artifact depend on a file outside it.
            raise ArtifactError(f"{folder}: {name} is not a regular file; {hint}")
        if status.st_size != info.bytes:
            raise ArtifactError(f"{folder}: {name} has {status.st_size} bytes, and {info.bytes} were written; {hint}")
    if not full:
        return
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for name, digest in zip(files, pool.map(lambda name: sha256_of(folder / name), files), strict=True):
            if digest != files[name].sha256:
                raise ArtifactError(f"{folder}: {name} is damaged: its SHA-256 is not the one written; {hint}")


def is_plain_name(name: str) -> bool:
    """Whether `name` is a file directly in the artifact's folder, and not its manifest."""
    return bool(name) and name not in (".", "..", MANIFEST_NAME) and not set(name) & {"/", "\\", "\0"}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises `ArtifactError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Names in `folder` that the manifest does not account for, hidden ones aside."""
    known = {MANIFEST_NAME, *manifest.files}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in known and entry.name[0] != ".")


def installed_plugins() -> dict[str, int]:
    """Our operators and their versions, as this plancast knows them."""
    versions: dict[str, int] = {}
    for module in pkgutil.iter_modules(plugins.__path__, "plugins."):
        if not module.ispkg:
            continue
        try:
            op = importlib.import_module(f"{module.name}.op")
        except ModuleNotFoundError as error:
            if error.name != f"{module.name}.op":
                raise
            continue
        versions[op.OP_TYPE] = op.VERSION
    return versions


def missing_isa(manifest: Manifest) -> list[str]:
    """CPU features that the compiled form uses and this machine lacks."""
    offered = set(this_machine().isa)
    return [feature for feature in manifest.hardware.isa if feature not in offered]


def _release(version: str) -> str:
    """The numbers of a version: 2026.4.1 of 2026.4.1-22982-e213a147257-releases/2026/4 and of 2026.4.1+local."""
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version


def _check_backend(manifest: Manifest, hint: str) -> None:
    backend = manifest.backend
    distribution = BACKEND_DISTRIBUTIONS.get(backend.name)
    if distribution is None:
        known = ", ".join(sorted(BACKEND_DISTRIBUTIONS))
        raise ArtifactError(
            f"{manifest.name}: its backend {backend.name!r} is unknown to this plancast, which has {known}; {hint}"
        )
    built = _release(backend.version)
    install = f"pip install {distribution}=={built}"
    try:
        installed = _release(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        raise ArtifactError(
            f"{manifest.name}: built with {backend.name} {built}, which is not installed here; {install}"
        ) from None
    if installed != built:
        raise ArtifactError(
            f"{manifest.name}: built with {backend.name} {built}, and {installed} is installed here; {hint} "
            f"(or {install})"
        )


def _check_plugins(manifest: Manifest, hint: str) -> None:
    installed = installed_plugins()
    needed = manifest.plugins | (manifest.draft_head.plugins if manifest.draft_head is not None else {})
    for op_type, version in needed.items():
        if op_type not in installed:
            raise ArtifactError(f"{manifest.name}: needs the plugin {op_type} v{version}, unknown here; {hint}")
        if installed[op_type] != version:
            raise ArtifactError(
                f"{manifest.name}: built with the plugin {op_type} v{version}, and this plancast has "
                f"v{installed[op_type]}; {hint}"
            )


def _check_hardware(manifest: Manifest, hint: str) -> tuple[str, ...]:
    machine = this_machine().machine
    if manifest.hardware.machine != machine:
        raise ArtifactError(
            f"{manifest.name}: built for {manifest.hardware.machine}, and this machine is {machine}; {hint}"
        )
    missing = missing_isa(manifest)
    if manifest.backend.blob is not None and missing:
        return (
            f"the compiled form is for a CPU with {', '.join(missing)}, which this one lacks; "
            f"{manifest.backend.engine} is compiled at load instead ({hint})",
        )
    return ()
