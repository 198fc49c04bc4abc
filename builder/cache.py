"""The build cache: whole artifacts, named by everything that went into their engines.

    $PLANCAST_HOME/builds/KEY/        an artifact
    $PLANCAST_HOME/builds/KEY.json    sizes and times of its files when it was written; its own time is its last use

An entry's files are hard-linked into the artifacts made from it, so caching takes no disk of its own. An entry whose
files were touched since is hashed again, and dropped where it no longer holds what was written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.drafts.head_file import head_hashes
from builder.quantization.prepare import needs_calibration
from builder.recipe import Recipe, recipe_to_dict
from plugins.native import find_native
from runtime.artifact import check_files, read_manifest
from runtime.errors import ArtifactError, BuildError, PlancastError
from runtime.hardware import this_machine
from runtime.manifest import FORMAT_VERSION, Manifest
from runtime.memory import parse_size
from zoo.progress import Progress

DEFAULT_SIZE = 20 << 30  # bytes; $PLANCAST_BUILD_CACHE_SIZE overrides it, 0 keeps nothing

_ROOT = Path(__file__).resolve().parent.parent
# Sources that decide what an engine is. What only shows or serves it is left out.
_SOURCES = ("builder", "plugins", "zoo", "runtime/kv_layout.py", "runtime/manifest.py")
_NOT_SOURCES = {"cli.py", "recipe_cli.py", "progress.py", "inspect.py", "graph_svg.py", "estimate.py", "cache.py"}
_KERNELS = ("kernel", "torch_kernel")  # Triton kernels run beside most engines, and lie compiled in others
# What engines hold that have Triton kernels in them: a format of theirs, and what compiles them.
_SEGMENT_SOURCES = ("runtime/executors/segments/plan.py", "runtime/executors/segments/calls.py")
_SEGMENT_LIBRARIES = ("triton", "tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings", "tensorrt")
_LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnx-graphsurgeon", "openvino", "numpy")
# Keys of a recipe that leave the engine as it is: its name, what serving may override, and the bounds it must meet. Of
# model and draft_head the contents count, not the names.
_NOT_IN_KEY = ("name", "model", "draft_head", "runtime", "speculation", "quality")


def build_key(recipe: Recipe, content: dict[str, str]) -> str:
    """SHA-256 (hex) over everything that changes an engine.

    `content`: SHA-256 by name of the checkpoint's files. The recipe's name, its serving defaults and its bounds are
    left out: they are written anew into each artifact.
    """
    facts = {
        "format": FORMAT_VERSION,
        "recipe": {key: value for key, value in recipe_to_dict(recipe).items() if key not in _NOT_IN_KEY},
        "checkpoint": content,
        "sources": _sources_hash(kernels=holds_kernels(recipe)),
        "libraries": {n: _version(n) for n in (*_LIBRARIES, *(_SEGMENT_LIBRARIES if holds_kernels(recipe) else ()))},
        "draft_head": head_hashes(recipe.draft_head) if recipe.draft_head is not None else None,
        # Any file may be named as the calibration text.
        "calibration": _text_hash(recipe.weights.calibration.text) if needs_calibration(recipe) else None,
        "python": sys.version_info[:2],
        "machine": this_machine().machine,
        # A compiled form is made for this very CPU; the C++ operators are used only where they are built.
        "isa": this_machine().isa if recipe.backend.blob and recipe.backend.name == "openvino" else None,
        "native": _native() if uses_native(recipe) else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def holds_kernels(recipe: Recipe) -> bool:
    """Whether the engine holds compiled Triton kernels."""
    return recipe.backend.name.startswith("tensorrt")


def uses_native(recipe: Recipe) -> bool:
    """Whether the engine depends on our C++ operators being built: for a compiled form, for products, for attention."""
    backend = recipe.backend
    return backend.name == "openvino" and (backend.blob or "native" in (backend.linear, backend.attention))


class BuildCache:
    """Artifacts by key, least recently used first to go once they take more than `max_bytes`."""

    def __init__(self, root: Path, max_bytes: int | None = None):
        self.root = root
        self.max_bytes = _configured_size() if max_bytes is None else max_bytes

    def entry(self, key: str) -> Path:
        """Where the artifact of `key` lies, or would lie."""
        return self.root / key

    @contextlib.contextmanager
    def locked(self, key: str, progress: Progress) -> Iterator[None]:
        """Hold `key` against other builds of the same engine: they wait, and then find it built."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f".{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.note("another plancast is building this very engine; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def find(self, key: str, progress: Progress) -> Manifest | None:
        """The manifest of `key`'s artifact, its files known to be whole; None where there is none."""
        entry = self.entry(key)
        if not entry.is_dir():
            return None
        try:
            manifest = read_manifest(entry)
            untouched = _stamps(entry, manifest) == _read_json(self._index(key))
            check_files(entry, manifest.files, full=not untouched, hint="")
        except ArtifactError as error:
            progress.note(f"the build cache held a damaged engine, built anew ({str(error).rstrip('; ')})")
            self.drop(key)
            return None
        if not untouched:
            self.record(key, manifest)
        with contextlib.suppress(OSError):
            os.utime(self._index(key))
        return manifest

    def record(self, key: str, manifest: Manifest) -> None:
        """Remember the state of `key`'s files, just written or just hashed."""
        index = self._index(key)
        temporary = index.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(_stamps(self.entry(key), manifest)))
        temporary.replace(index)

    def drop(self, key: str) -> None:
        """Remove `key`'s artifact."""
        self._index(key).unlink(missing_ok=True)
        shutil.rmtree(self.entry(key), ignore_errors=True)

    def trim(self) -> None:
        """Drop the least recently used entries until the rest take no more than the bound."""
        entries: list[tuple[float, str, int]] = []
        for folder in self.root.iterdir():
            if folder.is_dir() and not folder.name.startswith("."):
                with contextlib.suppress(OSError):  # another process trims too
                    index = self._index(folder.name)
                    used = (index if index.exists() else folder).stat().st_mtime
                    entries.append((used, folder.name, sum(file.stat().st_size for file in folder.iterdir())))
        total = sum(size for _, _, size in entries)
        for _, key, size in sorted(entries):
            if total <= self.max_bytes:
                break
            self.drop(key)
            total -= size

    def _index(self, key: str) -> Path:
        return self.root / f"{key}.json"


def place(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`: a hard link, or a copy where the file systems differ.

    Small files are copied: they are what people edit, and a link would carry the edit into the cache.
    """
    if source.stat().st_size >= 1 << 20:
        try:
            os.link(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                raise
    shutil.copyfile(source, target)


def _stamps(folder: Path, manifest: Manifest) -> dict[str, list[int]]:
    """Size, modification time (ns) and inode of each file."""
    stamps: dict[str, list[int]] = {}
    for name in manifest.files:
        with contextlib.suppress(OSError):
            status = (folder / name).lstat()
            stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return stamps


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _sources_hash(*, kernels: bool) -> str:
    digest = hashlib.sha256()
    skipped = (".",) if kernels else (".", *_KERNELS)
    for name in (*_SOURCES, *(_SEGMENT_SOURCES if kernels else ())):
        path = _ROOT / name
        files = sorted(path.rglob("*.py")) + sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        for file in files:
            if file.name not in _NOT_SOURCES and not file.name.startswith(skipped):
                digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _text_hash(path: str | None) -> str | None:
    """Of a text file of the user's; a missing one is told where it is read."""
    try:
        return None if path is None else hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except OSError:
        return None


def _native() -> str | None:
    library = find_native()
    return library.parent.name if library is not None else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _configured_size() -> int:
    text = os.environ.get("PLANCAST_BUILD_CACHE_SIZE")
    if text is None:
        return DEFAULT_SIZE
    if text.strip() == "0":
        return 0
    try:
        return parse_size(text)
    except PlancastError as error:
        raise BuildError(f"PLANCAST_BUILD_CACHE_SIZE: {error}") from None
