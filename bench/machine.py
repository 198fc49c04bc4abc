"""What machine a figure was measured on, and its own limits."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.hardware import this_machine

_UNITS = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
}


def describe_machine() -> dict:
    """Processor, its instruction sets, cores, memory (bytes), date and time: what every table of results names."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": model,
        "isa": list(this_machine().isa),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "date": datetime.date.today().isoformat(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_name(machine: Mapping[str, Any]) -> str:
    """Of `describe_machine`: the processor and its widest units, such as "AMD EPYC (AVX-512 VNNI)"."""
    isa = machine.get("isa", ())
    widest = next((name for feature, name in _UNITS.items() if feature in isa), None)
    return f"{machine['processor']} ({widest})" if widest else machine["processor"]


def read_bandwidth(megabytes: int = 256, rounds: int = 5) -> float:
    """Bytes a second that one thread reads from memory (the best of `rounds` sums over a buffer past the caches)."""
    buffer = np.ones(megabytes * (1 << 20) // 8, dtype=np.float64)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best


class Limits(NamedTuple):
    """What a machine can do at best, on some number of threads. None: it has no such unit, or nothing measures it.

    Attributes:
        read_bytes: bytes a second read from memory.
        int8_ops: operations a second (a multiply and an add are two) of 8-bit dot products.
        bf16_ops: the same of bf16.
    """

    read_bytes: float
    int8_ops: float | None = None
    bf16_ops: float | None = None


def measure_limits(native: Path | None, threads: int = 1, rounds: int = 5) -> Limits:
    """Measure the machine by our own library of C++ operators; without one (None), by NumPy on one thread."""
    if native is None:
        return Limits(read_bandwidth(rounds=rounds))
    from plugins.linear.native import library

    calls = library(native)
    buffer = np.ones(256 << 20, np.uint8)
    read = min(_seconds(lambda: calls.plancast_read(buffer.ctypes.data, buffer.nbytes, threads)) for _ in range(rounds))
    return Limits(buffer.nbytes / read, _peak(calls, 0, threads, rounds), _peak(calls, 2, threads, rounds))


def _peak(calls, kind: int, threads: int, rounds: int) -> float | None:
    count = 16 * 16 * 24_000  # a multiple of the chains of dot products in each of a thread's tasks
    width = calls.plancast_peak(kind, 1, threads)
    if not width:
        return None
    return (
        2
        * width
        * count
        * threads
        / min(_seconds(lambda: calls.plancast_peak(kind, count, threads)) for _ in range(rounds))
    )


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
