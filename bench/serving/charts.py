"""Line charts as SVG, on `runtime.svg`'s sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runtime.svg import FAINT, Svg, round_step

COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#0891b2", "#be185d", "#65a30d")
_WIDTH, _HEIGHT = 720.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 20.0, 52.0, 48.0

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str, y_label: str, *, log_x: bool = False, filled: bool = False
) -> str:
    """One line a series over common axes; `log_x`: powers of two; `filled`: areas, each drawn over the ones before."""
    svg = Svg(_WIDTH, _HEIGHT)
    svg.text(_LEFT, 22, title, size=14, bold=True)
    drawn = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    every = [point for points in drawn.values() for point in points]
    if not every:
        svg.text(_LEFT, _TOP + 30, "nothing to draw", fill=FAINT)
        return svg.render()
    xs = [x for x, _ in every]
    low, high = (min(xs), max(xs)) if log_x else (min(0.0, *xs), max(xs))
    top = max(y for _, y in every) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        if log_x and low > 0:
            share = math.log(x / low) / math.log(high / low) if high > low else 0.5
        else:
            share = (x - low) / (high - low) if high > low else 0.5
        return _LEFT + width * share, _TOP + height * (1 - y / top)

    _axes(svg, xs, high, top, place, x_label, y_label, log_x=log_x)
    at = _LEFT
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(*point) for point in points]
        if filled:
            svg.area(placed, _TOP + height, colour)
        else:
            svg.line(placed, colour, 2)
        if len(points) < 16 and not filled:
            for (x, y), (given, value) in zip(placed, points, strict=True):
                svg.rect(x - 3, y - 3, 6, 6, colour, f"{name}: {given:g}, {value:.4g}")
        svg.rect(at, 31, 10, 10, colour)
        svg.text(at + 14, 40, name)
        at += 30 + 6.3 * len(name)
    return svg.render()


def _axes(
    svg: Svg, xs: list[float], high: float, top: float, place, x_label: str, y_label: str, *, log_x: bool
) -> None:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    step = round_step(top / 5)
    for count in range(int(top / step + 1e-9) + 1):
        _, y = place(high, count * step)
        svg.line([(_LEFT, y), (right, y)], FAINT, 0.4)
        svg.text(_LEFT - 6, y + 4, f"{count * step:g}", size=10, anchor="end", fill=FAINT)
    if log_x:
        ticks = sorted(set(xs))
    else:
        wide = round_step(high / 8) if high > 0 else 1.0
        ticks = [count * wide for count in range(int(high / wide + 1e-9) + 1)]
    for tick in ticks:
        x, _ = place(tick, 0)
        svg.line([(x, bottom), (x, bottom + 4)], FAINT, 1)
        svg.text(x, bottom + 16, f"{tick:g}", size=10, anchor="middle", fill=FAINT)
    svg.line([(_LEFT, bottom), (right, bottom)], FAINT, 1)
    svg.text(right, bottom + 34, x_label, size=10, anchor="end", fill=FAINT)
    svg.text(right, 22, y_label, size=10, anchor="end", fill=FAINT)
