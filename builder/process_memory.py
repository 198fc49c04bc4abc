"""How much memory a build takes: this process and the helpers it started, sampled while it works."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident bytes of this process and its descendants (0 where /proc does not tell)."""
    total, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        folder = Path("/proc") / str(process)
        try:
            total += int((folder / "statm").read_text().split()[1]) * _PAGE
            for thread in (folder / "task").iterdir():
                pending += [int(child) for child in (thread / "children").read_text().split()]
        except (OSError, ValueError):
            continue  # it ended meanwhile
    return total


def release_memory() -> None:
    """Drop what nothing refers to any more, and return freed memory to the system (glibc alone can)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: large tensors that come and go then cost no page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, 1 << 30)


class MemoryMeter:
    """Samples `resident_bytes` in a thread of its own. A context manager.

    Attributes:
        current: bytes at the last sample.
        peak: the most since the last `take_peak`, in bytes.
        highest: the most since the start, in bytes.
    """

    def __init__(self, interval: float = 0.1):
        self.current = self.peak = self.highest = resident_bytes()
        self._interval = interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> MemoryMeter:
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def take_peak(self) -> int:
        """The most since the last call, in bytes; starts over."""
        self._sample()
        peak, self.peak = self.peak, self.current
        return peak

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        self.current = resident_bytes()
        self.peak = max(self.peak, self.current)
        self.highest = max(self.highest, self.current)
