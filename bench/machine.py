"""What machine a figure was measured on, and its own limits."""

from __future__ import annotations

import datetime
import os
import platform
import time

import numpy as np


def describe_machine() -> dict:
    """Processor, cores, memory (bytes) and date: what every table of results names."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "date": datetime.date.today().isoformat(),
    }


def read_bandwidth(megabytes: int = 256, rounds: int = 5) -> float:
    """Bytes a second that one thread reads from memory (the best of `rounds` sums over a buffer past the caches)."""
    buffer = np.ones(megabytes * (1 << 20) // 8, dtype=np.float64)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best
