"""Line charts on a sheet of `runtime.svg`: several series over one pair of axes, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.svg import FAINT, INK, Svg, round_step

PALETTE = ("#2563eb", "#059669", "#d97706", "#7c3aed", "#dc2626", "#0891b2", "#db2777", "#4b5563")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 460, 80, 230, 50, 60


@dataclass(frozen=True, slots=True)
class Series:
    """Points `(x, y)` under a name. `line`: joined by a line; otherwise dots alone, each with its own label."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    line: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What is drawn along one side. A logarithmic axis takes positive values alone; others are left out."""

    label: str
    log: bool = False

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The chart as an SVG document. Nothing is drawn of a series without points."""
    svg = Svg(_WIDTH, _HEIGHT)
    svg.text(_LEFT, 26, title, size=15, bold=True)
    kept = [[(a, b) for a, b in one.points if x.holds(a) and y.holds(b)] for one in series]
    across = _Scale(x, [a for points in kept for a, _ in points], _LEFT, _WIDTH - _RIGHT)
    up = _Scale(y, [b for points in kept for _, b in points], _HEIGHT - _BOTTOM, _TOP)
    for tick in across.ticks():
        at = across(tick)
        svg.line([(at, _TOP), (at, _HEIGHT - _BOTTOM)], "#e5e7eb", 0.6)
        svg.text(at, _HEIGHT - _BOTTOM + 16, _short(tick), size=10, anchor="middle", fill=FAINT)
    for tick in up.ticks():
        at = up(tick)
        svg.line([(_LEFT, at), (_WIDTH - _RIGHT, at)], "#e5e7eb", 0.6)
        svg.text(_LEFT - 6, at + 4, _short(tick), size=10, anchor="end", fill=FAINT)
    svg.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 18, x.label, size=11, anchor="middle")
    svg.text(_LEFT, _TOP - 8, y.label, size=11)
    for index, (one, points) in enumerate(zip(series, kept, strict=True)):
        colour = PALETTE[index % len(PALETTE)]
        svg.rect(_WIDTH - _RIGHT + 16, _TOP + 20 * index, 12, 12, colour)
        svg.text(_WIDTH - _RIGHT + 34, _TOP + 20 * index + 10, one.name, size=11)
        placed = [(across(a), up(b)) for a, b in points]
        if one.line and len(placed) > 1:
            svg.line(placed, colour, 2)
        labels = [*one.labels, *[""] * (len(points) - len(one.labels))]
        for (a, b), (px, py), label in zip(points, placed, labels, strict=False):
            if not one.line or len(placed) == 1:
                svg.rect(px - 4, py - 4, 8, 8, colour, f"{label or one.name}: {a:g}, {b:g}")
                svg.text(px + 7, py - 5, label, size=9, fill=INK)
    return svg.render()


class _Scale:
    """Values -> pixels from `start` to `end`."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float):
        self.log, self.start, self.end = axis.log, start, end
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if self.log:
            self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            self.high = max(self.high, self.low + 1)
        else:
            self.low, self.high = min(0.0, low), high if high > min(0.0, low) else low + 1

    def __call__(self, value: float) -> float:
        share = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**power for power in range(int(self.low), int(self.high) + 1)]
        step = round_step((self.high - self.low) / 6)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, int(self.high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
