"""What this machine is, as far as a compiled engine cares."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from runtime.manifest import HardwareInfo

# The CPU features that change which kernels a compiled engine holds, by their names in /proc/cpuinfo.
_ISA = (
    "sse4_2",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


@functools.cache
def this_machine() -> HardwareInfo:
    """The machine's architecture and the CPU features it offers (none where the system does not tell)."""
    offered: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                offered = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    return HardwareInfo(machine=platform.machine(), isa=[feature for feature in _ISA if feature in offered])
