"""How long work tells a person where it is: one small protocol, so that zoo prints nothing itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what a pull is doing. Called from one thread."""

    def note(self, line: str) -> None:
        """A line worth keeping, such as why a source was passed over."""
        ...

    def update(self, task: str, done: int, total: int | None) -> None:
        """`done` of `total` (None: unknown) units of `task`, bytes where the task is a download."""
        ...


class Silent:
    """Tells nobody."""

    def note(self, line: str) -> None:
        pass

    def update(self, task: str, done: int, total: int | None) -> None:
        pass
