"""JSON files of an artifact that say in which format they are."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from runtime.errors import ArtifactError


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


_T = TypeVar("_T", bound=_Versioned)


def read_versioned(path: Path, kind: type[_T], supported: int, hint: str) -> _T:
    """What the file `path` holds, a struct `kind` whose `format` must be `supported`.

    Raises:
        ArtifactError: it is missing, damaged or of another format; with `hint`, what to do.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); {hint}") from None
    if found.format != supported:
        raise ArtifactError(f"{path}: format {found.format}, and this plancast reads format {supported}; {hint}")
    return found
