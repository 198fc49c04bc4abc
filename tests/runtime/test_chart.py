"""Charts: every point on the sheet, in the right order, whatever the values."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from runtime.chart import Axis, Series, chart

POSITIVE = st.floats(1e-6, 1e9, allow_nan=False)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=8), st.booleans(), st.booleans())
def test_points_lie_within_the_axes_and_keep_their_order(points, log_x, log_y) -> None:
    document = ET.fromstring(chart("t", Axis("x", log_x), Axis("y", log_y), [Series("s", points)]))
    (line,) = document.findall(".//{*}polyline[@stroke-width='2']")
    placed = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(placed) == len(points)
    for (x, y), (px, py) in zip(points, placed, strict=True):
        assert 79.9 <= px <= 670.1
        assert 49.9 <= py <= 400.1
        for (other_x, other_y), (other_px, other_py) in zip(points, placed, strict=True):
            assert x <= other_x or px >= other_px
            assert y <= other_y or py <= other_py


def test_nothing_to_draw_and_values_off_a_log_axis() -> None:
    ET.fromstring(chart("none", Axis("x"), Axis("y"), []))
    document = ET.fromstring(chart("zero", Axis("x", True), Axis("y", True), [Series("s", [(0, 1), (1, 0), (2, 3)])]))
    assert not document.findall(".//{*}polyline[@stroke-width='2']")  # one point is no line
