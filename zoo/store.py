"""Where plancast keeps what it pulled: folders that appear whole or not at all, and one puller at a time.

$PLANCAST_HOME (default ~/.cache/plancast)
  models/NAME-HASH/    Hugging Face style folders made from GGUF files
  pulled/NAME.json     which source a model was last pulled from
  downloads/           files on their way
  hashes/, locks/      SHA-256 of large files, one lock a model
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import ZooError
from runtime.memory import available_memory, format_size
from zoo.progress import Progress, Silent

_STAGING_SUFFIX = ".part"
_DISK_MARGIN = 256 << 20  # bytes left free after any write of ours


def home() -> Path:
    """The root of the store. Raises `ZooError` where it cannot be made."""
    root = Path(os.environ.get("PLANCAST_HOME") or "~/.cache/plancast").expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZooError(f"cannot make {root}: {error.strerror}; set PLANCAST_HOME to a folder of yours") from None
    return root


def subfolder(name: str) -> Path:
    """A part of the store, made where it is missing."""
    folder = home() / name
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ZooError(f"cannot make {folder}: {error.strerror}; set PLANCAST_HOME to a folder of yours") from None
    return folder


def slug(text: str) -> str:
    """`text` as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", text).strip(".-") or "model"


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it becomes `target` in one rename, else nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_STAGING_SUFFIX}")
    folder.mkdir()
    try:
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def drop_leftovers(target: Path) -> None:
    """Remove what killed pulls of `target` left behind. Call it under `target`'s lock."""
    for leftover in target.parent.glob(f".{target.name}.*{_STAGING_SUFFIX}"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def locked(name: str, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock `name` across processes and threads. The system frees it when its holder dies."""
    path = subfolder("locks") / f"{slug(name)}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (progress or Silent()).note(f"another plancast is pulling {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` in one rename, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_STAGING_SUFFIX}")
    try:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """What `path` holds, or None where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def require_disk(folder: Path, nbytes: int, what: str) -> None:
    """Raise `ZooError` unless `nbytes` (and a margin) fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if nbytes + _DISK_MARGIN > free:
        raise ZooError(
            f"{what} takes {format_size(nbytes)} in {folder}, where {format_size(free)} are free "
            f"(and {format_size(_DISK_MARGIN)} must stay free); make room, or set PLANCAST_HOME to another disk"
        )


def require_memory(nbytes: int, what: str) -> None:
    """Raise `ZooError` unless `nbytes` of memory may still be taken."""
    free = available_memory()
    if nbytes > free.bytes:
        raise ZooError(
            f"{what} takes {format_size(nbytes)} of memory, and {format_size(free.bytes)} are free (limit: the "
            f"{free.limited_by}); use a smaller model, or a machine with more"
        )
