"""Write an artifact whole or not at all.

Everything is written into a hidden folder beside the final name and synced; one rename makes it the artifact. The
hidden folder is locked by its writer, so that a later writer knows which ones belong to the dead and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec

from runtime.artifact import is_plain_name, read_manifest, sha256_of, unlisted_files
from runtime.errors import ArtifactError
from runtime.manifest import MANIFEST_NAME, FileInfo, Manifest, encode_manifest

_WRITING = "writing"
_REPLACED = "replaced"
_HIDDEN = re.compile(rf"\.(?P<target>.+)\.(?P<purpose>{_WRITING}|{_REPLACED})-\d+-[0-9a-f]{{8}}")
_YOUNG = 60.0  # seconds in which a folder that nobody has locked may be one that is just being made


class ArtifactWriter:
    """Writes the artifact `target`. A context manager: leaving it without `commit` removes everything written.

        with ArtifactWriter(folder) as writer:
            (writer.path / "engine.xml").write_text(...)
            writer.commit(manifest)

    An artifact already at `target` is replaced in the instant of the commit; whoever has its files open or mapped
    keeps them.

    Raises:
        ArtifactError: `target` is something other than an artifact, or cannot be written.
    """

    def __init__(self, target: str | os.PathLike[str]):
        self.target = Path(os.path.abspath(Path(target).expanduser()))
        self._path: Path | None = None
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The hidden folder to write into, on the same file system as the target."""
        if self._path is None:
            raise RuntimeError("ArtifactWriter.path is valid only between entering the context and its end")
        return self._path

    def __enter__(self) -> ArtifactWriter:
        check_replaceable(self.target)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.target.parent)
            self._path = self.target.with_name(_hidden_name(self.target, _WRITING))
            self._path.mkdir()
            self._lock = _lock(self._path)
        except OSError as error:
            raise ArtifactError(f"{self.target}: cannot be written there ({error.strerror})") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._path is not None:
                shutil.rmtree(self._path, ignore_errors=True)
        finally:
            self._path = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
        if isinstance(error, OSError) and is_out_of_space(error):
            raise ArtifactError(out_of_space_message(self.target.parent, error)) from None

    def commit(self, manifest: Manifest, known: dict[str, FileInfo] | None = None) -> Manifest:
        """Hash and list every file written, add the manifest, and put the folder in place under its final name.

        `known` spares hashing the files whose digests are certain (linked from a checked source). Returns the
        manifest as written.
        """
        known = known or {}
        names = sorted(entry.name for entry in self.path.iterdir())
        for name in names:
            if not is_plain_name(name) or not (self.path / name).is_file() or (self.path / name).is_symlink():
                raise ArtifactError(f"{self.target}: {name} is no regular file, and an artifact holds nothing else")
        files = {name: known.get(name) or _describe(self.path / name) for name in names}
        manifest = msgspec.structs.replace(manifest, files=files)
        (self.path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
        for name in [*files, MANIFEST_NAME]:
            _sync(self.path / name)
        _sync(self.path)
        self._publish()
        return manifest

    def _publish(self) -> None:
        check_replaceable(self.target)  # again: the build took a while
        replaced: Path | None = None
        try:
            if self.target.exists():
                replaced = self.target.with_name(_hidden_name(self.target, _REPLACED))
                self.target.rename(replaced)
            self.path.rename(self.target)
        except BaseException:
            if replaced is not None and replaced.exists() and not self.target.exists():
                replaced.rename(self.target)
            raise
        self._path = None
        _sync(self.target.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)


def check_replaceable(target: Path) -> None:
    """Raise `ArtifactError` unless `target` can be made, or is an empty folder, or an artifact and nothing but that.

    A damaged artifact counts as one as long as its engine files tell: what cannot be loaded must be rebuildable.
    """
    if not os.path.lexists(target):
        parent = next(folder for folder in target.absolute().parents if os.path.lexists(folder))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ArtifactError(f"{target}: cannot be made in {parent}, which is no folder that may be written to")
        return
    refusal = "choose another --out, or move it away"
    if target.is_symlink() or not target.is_dir():
        raise ArtifactError(f"{target}: exists and is not a folder, so it is not replaced; {refusal}")
    names = [entry.name for entry in target.iterdir()]
    if not names:
        return
    try:
        extra = unlisted_files(target, read_manifest(target))
    except ArtifactError:
        if any(name.startswith("engine.") for name in names):
            return
        raise ArtifactError(
            f"{target}: exists and is not an artifact ({len(names)} other files), so it is not replaced; {refusal}"
        ) from None
    if extra:
        raise ArtifactError(f"{target}: holds {extra[0]}, which the build did not put there; move it away first")


def remove_leftovers(folder: Path) -> None:
    """Clean up in `folder` after writers that died: put back what they had moved away, drop what they wrote."""
    hidden = [(entry, match) for entry in folder.iterdir() if (match := _HIDDEN.fullmatch(entry.name))]
    for entry, match in sorted(hidden, key=lambda pair: pair[1]["purpose"]):  # what was replaced comes first
        if _is_abandoned(entry):
            target = folder / match["target"]
            if match["purpose"] == _REPLACED and not target.exists() and (entry / MANIFEST_NAME).exists():
                entry.rename(target)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def is_out_of_space(error: BaseException) -> bool:
    """Whether `error` says that the disk, the quota or the file size limit is exhausted."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def out_of_space_message(folder: Path, error: OSError) -> str:
    """One line for a person about a full disk."""
    free = shutil.disk_usage(folder).free >> 20
    return (
        f"{folder}: {error.strerror} while writing, {free} MiB are free; make room and start again (nothing was left)"
    )


def _hidden_name(target: Path, purpose: str) -> str:
    return f".{target.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"


def _is_abandoned(folder: Path) -> bool:
    """Whether the writer of a hidden folder is gone: its lock is free, and no process of its number lives here.

    The lock alone would do but for the instant between making a folder and locking it; the number alone would do but
    for containers that share a disk and not their process numbers.
    """
    lock = None
    try:
        lock = _lock(folder)
        if lock is None:
            return False
        process = int(folder.name.rsplit("-", 2)[1])
        os.kill(process, 0)
    except (ProcessLookupError, ValueError):
        return True
    except OSError:
        return False
    finally:
        if lock is not None:
            os.close(lock)
    # A number that lives may be another process's by now: then the folder is old, and nobody holds its lock. A replaced
    # artifact, though, is as old as its build, and moved away only for an instant.
    return f".{_WRITING}-" in folder.name and time.time() - folder.stat().st_mtime > _YOUNG


def _lock(folder: Path) -> int | None:
    """Lock `folder` until the returned descriptor is closed (or its process ends); None where another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        # A network file system may not lock folders: then the process number in the name has to do.
        pass
    return descriptor


def _describe(path: Path) -> FileInfo:
    return FileInfo(sha256=sha256_of(path), bytes=path.stat().st_size)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
