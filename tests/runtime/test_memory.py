"""Free memory under control groups, and the KV cache's size that comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PlancastError
from runtime.kv_layout import KvLayer, KvLayout
from runtime.memory import FreeMemory, available_memory, format_size, parse_size, plan_kv_cache

GIB = 1 << 30
LAYER = KvLayer(num_kv_heads=3, key_head_size=64, value_head_size=64, key_dtype="f32", value_dtype="f32")
LAYOUT = KvLayout(block_size=32, layers=(LAYER,) * 30)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", GIB),
        ("1.5 gib", GIB * 3 // 2),
        ("512MB", 512_000_000),
        ("2g", 2_000_000_000),
        ("64k", 64_000),
        (4096, 4096),
        ("123", 123),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1 GiB of it", "GiB", "1e9", "0", "0.0001", "1PB", "NaN"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(PlancastError, match="size"):
        parse_size(text)


@given(st.integers(1, 1 << 50))
def test_a_formatted_size_reads_back_to_within_its_precision(size: int) -> None:
    assert parse_size(format_size(size).replace(" bytes", "")) == pytest.approx(size, rel=0.06)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MACHINE = {
    "proc/meminfo": "MemTotal: 20000000 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n",
    "proc/self/statm": "9 9",
}


def test_the_machine_limits_where_no_control_group_does(tmp_path: Path) -> None:
    write(tmp_path, MACHINE | {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/memory.max": "max\n"})
    assert available_memory(tmp_path) == FreeMemory(16 * GIB, "machine")


def test_the_tightest_group_above_limits_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/container"
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{6 * GIB}\n",
        f"{group}/memory.stat": f"anon 1\ninactive_file {3 * GIB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{7 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path) == FreeMemory(2 * GIB, "control group")


def test_a_container_that_sees_its_group_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/abc\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path).bytes == 3 * GIB


def test_control_groups_of_version_one(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
        f"{group}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{GIB}\n",
        f"{group}/memory.stat": f"total_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path).bytes == GIB * 3 // 2


def test_this_machine_has_some() -> None:
    assert 0 < available_memory().bytes < 1 << 50


def plan(free: int = 20 * GIB, **options):
    return plan_kv_cache(LAYOUT, max_num_seqs=4, max_context_len=2048, free=FreeMemory(free, "machine"), **options)


def test_a_size_asked_for_is_taken_in_whole_blocks() -> None:
    found = plan(kv_cache_memory=GIB)
    assert found.num_blocks == GIB // LAYOUT.bytes_per_block
    assert found.bytes == found.num_blocks * LAYOUT.bytes_per_block <= GIB


def test_by_default_a_share_of_what_is_free() -> None:
    found = plan(free=GIB // 2, share=0.5)
    assert found.num_blocks == GIB // 4 // LAYOUT.bytes_per_block
    assert "50%" in found.reason


def test_never_more_than_the_limits_can_fill() -> None:
    found = plan(free=200 * GIB)
    assert found.num_blocks == 4 * 2048 // 32
    assert "2048" in found.reason


def test_more_than_is_there_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlancastError, match=r"2\.0 GiB.*1\.0 GiB"):
        plan(free=GIB, kv_cache_memory=2 * GIB)


def test_less_than_a_block_is_refused_with_the_block_size() -> None:
    with pytest.raises(PlancastError, match=format_size(LAYOUT.bytes_per_block)):
        plan(kv_cache_memory=1000)
