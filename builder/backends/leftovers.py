"""What a backend that fails leaves in the folder it was given: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def removing_new_files(folder: Path) -> Iterator[None]:
    """On any exception, Ctrl-C too, remove the files that were made in `folder` meanwhile; the exception goes on."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            path.unlink()
        raise
