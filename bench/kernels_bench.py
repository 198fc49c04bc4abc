"""The C++ kernels without a graph around them, against what the machine can do at best.

Each kind of kernel brings a function that yields figures; `KINDS` names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention_kernels import attention
from bench.machine import Limits, describe_machine, measure_limits
from plugins.linear.native import Product, available_isas
from plugins.linear.op import Activations, Kind, Weight, group_count, pack
from plugins.native import build_native
from runtime.errors import PlancastError

# A decoder's products: SmolLM2-135M's gate and up, and one of 1B class. Copies of a weight are used in turn, so that
# the caches hold none of them.
SHAPES = ((3072, 576), (8192, 2048))
COPIES_BYTES = 96 << 20
FORMATS: dict[str, tuple[Kind, int, Activations]] = {
    "int8": ("int8", 0, "int16"),
    "int8, int8 activations": ("int8", 0, "int8"),
    "int8 group 32": ("int8", 32, "int8"),
    "int4 group 32": ("int4", 32, "int8"),
    "int4 group 128": ("int4", 128, "int8"),
    "bf16": ("bf16", 0, "bf16"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What every kind of kernel is told."""

    native: Path
    threads: int
    rows: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. `bytes`: read from memory by a call; `ops`: multiplies and adds; `peak`: their limit."""

    kernel: str
    case: str
    rows: int
    seconds: float
    bytes: int
    ops: int
    peak: str  # int8 | bf16


def linear(settings: Settings) -> Iterator[Figure]:
    """Products in every weight format."""
    for channels, columns in SHAPES:
        for name, (kind, group, activations) in FORMATS.items():
            weight = _weight(kind, channels, columns, group)
            packed = pack(weight)
            copies = max(1, COPIES_BYTES // packed.nbytes)
            products = [Product(settings.native, weight, packed.copy(), activations) for _ in range(copies)]
            for rows in settings.rows:
                x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
                seconds = _time(products, x, settings)
                case = f"{name}, {channels} x {columns}"
                peak = "bf16" if kind == "bf16" else "int8"
                yield Figure("linear", case, rows, seconds, packed.nbytes, 2 * rows * channels * columns, peak)


KINDS: dict[str, Callable[[Settings], Iterator[Figure]]] = {"linear": linear, "attention": attention}


def bench_kernels(
    *,
    only: list[str],
    threads: int | None,
    rows: tuple[int, ...],
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every kind, or those of `only`. Times are the best of the calls that fit into `seconds`.

    Raises:
        PlancastError: a kind that there is not, or no C++ operators here.
    """
    import os

    unknown = [name for name in only if name not in KINDS]
    if unknown:
        raise PlancastError(f"there is no kind of kernel {unknown[0]!r}; there are: {', '.join(KINDS)}")
    native = build_native()
    settings = Settings(native, threads or len(os.sched_getaffinity(0)), rows, seconds)
    progress("the machine's own limits")
    limits = measure_limits(native, settings.threads)
    figures = []
    for name in only or KINDS:
        for figure in KINDS[name](settings):
            progress(f"{figure.kernel}: {figure.case}")
            figures.append(_report(figure, limits))
    return {
        "machine": describe_machine(),
        "threads": settings.threads,
        "isa": available_isas(native)[0],
        "limits": limits._asdict(),
        "figures": figures,
    }


def print_report(report: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    limits = report["limits"]
    peaks = ", ".join(
        f"{limits[f'{kind}_ops'] / 1e9:.0f} GOPS {kind}" for kind in ("int8", "bf16") if limits[f"{kind}_ops"]
    )
    table = Table("kernel", "rows", "us", "GB/s", "of read", "GOPS", "of peak")
    for figure in report["figures"]:
        share = figure["of_peak"]
        table.add_row(
            figure["case"],
            str(figure["rows"]),
            f"{figure['seconds'] * 1e6:.1f}",
            f"{figure['gb_per_s']:.1f}",
            f"{figure['of_read']:.0%}",
            f"{figure['gops']:.0f}",
            "-" if share is None else f"{share:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{report['machine']['processor']}, {report['threads']} threads, {report['isa']}: reads "
        f"{limits['read_bytes'] / 1e9:.1f} GB/s, at best {peaks or 'unknown'}. int16 activations take two passes."
    )


def _report(figure: Figure, limits: Limits) -> dict[str, Any]:
    peak = limits.int8_ops if figure.peak == "int8" else limits.bf16_ops
    gops = figure.ops / figure.seconds
    return {
        **asdict(figure),
        "gb_per_s": figure.bytes / figure.seconds / 1e9,
        "of_read": figure.bytes / figure.seconds / limits.read_bytes,
        "gops": gops / 1e9,
        "of_peak": gops / peak if peak else None,
    }


def _weight(kind: Kind, channels: int, columns: int, group: int) -> Weight:
    rng = np.random.default_rng(0)
    if kind == "bf16":
        return Weight("bf16", rng.integers(0x3C00, 0x3D00, (channels, columns), dtype=np.uint16))
    scale = np.full((channels, group_count(columns, group)), 2.0**-8, np.float32)
    if kind == "int8":
        return Weight("int8", rng.integers(-128, 128, (channels, columns), dtype=np.int8), scale, group=group)
    return Weight("int4", rng.integers(0, 16, (channels, columns), dtype=np.uint8), scale, group=group)


def _time(products: list[Product], x: NDArray[np.float32], settings: Settings) -> float:
    """Seconds of one call: the best round over all copies, of the rounds that fit."""
    y = np.empty((len(x), products[0].channels), np.float32)
    best, end = float("inf"), time.perf_counter() + settings.seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        for product in products:
            product(x, out=y, threads=settings.threads)
        best = min(best, (time.perf_counter() - start) / len(products))
        rounds += 1
    return best
