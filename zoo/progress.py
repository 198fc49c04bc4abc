"""How long work tells a person where it is: one small protocol, so that zoo prints nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Progress(Protocol):
    """Receives what a pull is doing. Called from one thread."""

    def note(self, line: str) -> None:
        """A line worth keeping, such as why a source was passed over."""
        ...

    def update(self, task: str, done: int, total: int | None) -> None:
        """`done` of `total` (None: unknown) units of `task`, bytes where the task is a download."""
        ...


def forwarding_tqdm(progress: Progress, task: str) -> type:
    """A tqdm class that draws nothing and forwards to `progress`, for libraries that take or use one."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, iterable: Any = None, *, total: int | None = None, initial: int = 0, **kwargs: Any):
            super().__init__(iterable, total=total, initial=initial, disable=True)
            self.done = initial
            self.whole = total if total is not None else len(iterable) if iterable is not None else None

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            progress.update(task, self.done, self.whole)

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update(1)

    return Bar


class Silent:
    """Tells nobody."""

    def note(self, line: str) -> None:
        pass

    def update(self, task: str, done: int, total: int | None) -> None:
        pass
