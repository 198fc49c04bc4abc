"""How much memory this process may still take, and how many KV blocks that makes.

Free memory is the least of what the machine, each control group above the process (v2 and v1) and the address-space
limit leave. Control groups count the page cache as used: what the kernel would give back at once is free to us.
"""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import PlancastError
from runtime.kv_layout import KvLayout

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
# A control group without a limit says "max" (v2) or a number near 2^63 (v1).
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that may still be taken, and who says so."""

    bytes: int
    limited_by: str  # machine | control group | address space


@dataclass(frozen=True, slots=True)
class KvCachePlan:
    """The KV cache's size: blocks, their bytes, and how the size came about, for people."""

    num_blocks: int
    bytes: int
    reason: str


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `1GiB`, `512MB`, `1.5g` or a plain number of bytes.

    Raises `PlancastError` where it is no size, or not above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if not match:
        raise PlancastError(f"{text!r} is not a size: write bytes, or a number with KB, MB, GB, KiB, MiB or GiB (1GiB)")
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if "." in match[1] else int(match[1]) * _UNITS[match[2] or ""]
    if size < 1:
        raise PlancastError(f"a size must be above zero, not {text!r}")
    return size


def format_size(size: int) -> str:
    """A size for people, in binary units: `1.5 GiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def available_memory(root: Path = Path("/")) -> FreeMemory:
    """What this process may still take. `root` stands before /proc and /sys (tests)."""
    candidates = [FreeMemory(_machine_free(root / "proc/meminfo"), "machine")]
    candidates += [FreeMemory(free, "control group") for free in _cgroup_free(root)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        candidates.append(FreeMemory(max(0, limit - pages * resource.getpagesize()), "address space"))
    return min(candidates, key=lambda candidate: candidate.bytes)


def plan_kv_cache(
    layout: KvLayout,
    *,
    max_num_seqs: int,
    max_context_len: int,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    share: float = 0.4,
    beside: KvLayout | None = None,
    free: FreeMemory | None = None,
) -> KvCachePlan:
    """How many KV blocks to allocate.

    `num_blocks` or `kv_cache_memory` bytes where given; else `share` of the free memory, but no more than
    `max_num_seqs` sequences of `max_context_len` tokens could ever fill. Raises `PlancastError` with the numbers where
    the size asked for is not there, or holds not even one block. `beside`: a second cache (a draft engine's) that holds
    as many tokens, out of the same memory.
    """
    block = layout.bytes_per_block
    if beside is not None:
        block += beside.bytes_per_token * layout.block_size
    if num_blocks is not None:
        return KvCachePlan(num_blocks, num_blocks * block, f"{num_blocks} blocks asked for")
    free = free or available_memory()
    if kv_cache_memory is not None:
        budget, reason = kv_cache_memory, f"{format_size(kv_cache_memory)} asked for"
        if budget > free.bytes:
            raise PlancastError(
                f"a KV cache of {format_size(budget)} does not fit: {format_size(free.bytes)} are free "
                f"({free.limited_by}). Ask for less (--kv-cache-memory), or free memory"
            )
    else:
        budget, reason = int(free.bytes * share), f"{share:.0%} of {format_size(free.bytes)} free ({free.limited_by})"
        most = max_num_seqs * -(-max_context_len // layout.block_size)
        if budget > most * block:
            budget = most * block
            reason = f"all that {max_num_seqs} sequences of {max_context_len} tokens can fill"
    num_blocks = budget // block
    if num_blocks < 1:
        raise PlancastError(
            f"a KV cache of {format_size(budget)} ({reason}) holds no block: one block of {layout.block_size} tokens "
            f"takes {format_size(block)}. Give it more with --kv-cache-memory"
        )
    return KvCachePlan(num_blocks, num_blocks * block, reason)


def _machine_free(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PlancastError(f"{meminfo} does not say how much memory is free: give --kv-cache-memory")


def _cgroup_free(root: Path) -> list[int]:
    """Bytes left in each control group from the process's own up to the root."""
    found: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit_name, usage_name, inactive = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit_name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage_name, inactive = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        # A container sees its own group at the mount's root although /proc names the path outside.
        for folder in [group, *group.parents] if group.is_dir() else [top]:
            if folder == top.parent:
                break
            free = _group_free(folder, limit_name, usage_name, inactive)
            if free is not None:
                found.append(free)
    return found


def _group_free(folder: Path, limit_name: str, usage_name: str, inactive: str) -> int | None:
    try:
        limit_text = (folder / limit_name).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None
        used = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no memory controller here
    return max(0, int(limit_text) - used + int(stat.get(inactive, 0)))
