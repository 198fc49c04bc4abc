"""Kernels compiled ahead of time for NVIDIA architectures, on a machine that needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="compiling kernels needs triton (pip install 'plancast[triton]')")

ROOT = Path(__file__).resolve().parents[2]


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "plugins.gpu", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The table's cells, but for the name: SM, registers, spills, shared, PTX, cubin, seconds."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [line[28:].split() for line in done.stdout.splitlines()[1:]]


def test_decode_attention_assembles_without_spills() -> None:
    (row,) = rows(compile_kernels("--cc", "90", "--only", "attend decode bf16"))
    assert row[0] == "90"
    assert 0 < int(row[1]) <= 168, f"{row[1]} registers: fewer than three blocks of 128 threads fit a multiprocessor"
    assert int(row[2]) == 0, f"{row[2]} bytes are spilled"


def test_every_architecture_assembles_what_decodes() -> None:
    """A packed KV cache and a packed weight, for A100, L4, H100, B200 and RTX 50: next to nothing spills."""
    table = rows(compile_kernels("--only", "attend decode int4,int4 product,reduce_splits"))
    by_architecture = {row[0]: [other for other in table if other[0] == row[0]] for row in table}
    assert {architecture: len(kernels) for architecture, kernels in by_architecture.items()} == dict.fromkeys(
        ("80", "89", "90", "100", "120"), 3
    )
    for row in table:
        assert 0 < int(row[1]) <= 255
        assert int(row[2]) <= 32, f"{row[2]} bytes are spilled on SM{row[0]}"
        assert int(row[4]) < 100_000, "PTX grew large"


def test_other_kernels_compile() -> None:
    """To PTX, for the oldest architecture."""
    names = "reduce,copy,swap,rms,gated,rope halves,int4 product,rope_and_write int4,prefill int4"
    table = rows(compile_kernels("--cc", "80", "--ptx-only", "--only", names))
    assert len(table) >= len(names.split(","))
    assert all(int(row[4]) < 200_000 for row in table), "PTX grew large"


def test_bad_arguments() -> None:
    done = compile_kernels("--cc", "ninety")
    assert done.returncode == 1
    assert "--cc takes numbers" in done.stderr
