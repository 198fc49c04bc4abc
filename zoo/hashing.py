"""SHA-256 of large files, remembered by path, size and time of change: a second build does not read them again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from zoo.progress import Progress, Silent
from zoo.store import read_json, subfolder, write_json

_CHUNK = 4 << 20
_REMEMBER_FROM = 16 << 20  # bytes; a smaller file is read faster than looked up


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 (hex) of the file at `path`."""
    progress = progress or Silent()
    path = path.resolve()
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    memory = None
    if stat.st_size >= _REMEMBER_FROM:
        memory = subfolder("hashes") / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
        known = read_json(memory)
        if isinstance(known, dict) and isinstance(known.get("sha256"), str):
            return known["sha256"]
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.update(f"checking {path.name}", done, stat.st_size)
    if memory is not None:
        write_json(memory, {"path": str(path), "sha256": digest.hexdigest()})
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
