"""A sheet to draw on: just enough SVG for timelines and charts, without a plotting library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

FONT = "ui-sans-serif, system-ui, sans-serif"
INK, FAINT, PAPER = "#1f2937", "#9ca3af", "#ffffff"


class Svg:
    """Shapes in pixels from the top left. `title` texts show when a reader points at a shape."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        body = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.2))}" height="{_n(height)}" fill="{fill}"{body}'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"' + (' font-weight="600"' if bold else "")
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}" {style}>{escape(text)}</text>')

    def line(self, points: Iterable[tuple[float, float]], stroke: str, width: float = 1.5) -> None:
        """A line through the points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>')

    def area(self, points: Iterable[tuple[float, float]], base: float, fill: str) -> None:
        """What lies between the points and the horizontal at `base`."""
        points = list(points)
        if points:
            outline = [(points[0][0], base), *points, (points[-1][0], base)]
            path = " ".join(f"{_n(x)},{_n(y)}" for x, y in outline)
            self._parts.append(f'<polygon points="{path}" fill="{fill}"/>')

    def axis(self, x: float, y: float, width: float, end: float, unit: str) -> None:
        """A horizontal axis from 0 to `end` with round ticks."""
        self.line([(x, y), (x + width, y)], FAINT, 1)
        step = round_step(end / 8) if end > 0 else 1.0
        tick = 0.0
        while tick <= end * 1.0001:
            at = x + (width * tick / end if end else 0.0)
            self.line([(at, y), (at, y + 4)], FAINT, 1)
            self.text(at, y + 15, f"{tick:g}", size=10, anchor="middle", fill=FAINT)
            tick += step
        self.text(x + width, y + 28, unit, size=10, anchor="end", fill=FAINT)

    def render(self) -> str:
        """The document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'width="{_n(self.width)}" height="{_n(self.height)}" font-family="{FONT}">'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(self._parts)}</svg>\n'
        )


def stack(documents: Iterable[str]) -> str:
    """Several documents of `Svg.render`, one below the other, as one."""
    placed, y, width = [], 0.0, 0.0
    for document in documents:
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', document)
        assert size is not None, "a document of Svg.render"
        placed.append(document.replace("<svg ", f'<svg y="{_n(y)}" ', 1))
        y, width = y + float(size[2]), max(width, float(size[1]))
    box = f'viewBox="0 0 {_n(width)} {_n(y)}" width="{_n(width)}" height="{_n(y)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(placed)}</svg>\n'


def round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 1.0
    while power * 10 <= step:
        power *= 10
    while power > step:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
