"""The layered layout: nothing overlaps, every edge points down, and crossings that need not be are not."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from builder.graph_layout import Box, lay_out


@st.composite
def graphs(draw: st.DrawFn) -> list[Box]:
    count = draw(st.integers(1, 14))
    boxes = []
    for index in range(count):
        inputs = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        boxes.append(Box(draw(st.floats(20, 200)), draw(st.floats(10, 60)), inputs))
    return boxes


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_boxes_lie_apart_and_edges_point_down(boxes: list[Box]) -> None:
    layout = lay_out(boxes, gap_x=10, gap_y=20)
    for index, box in enumerate(boxes):
        assert box.x - box.width / 2 >= -1e-6
        assert box.x + box.width / 2 <= layout.width + 1e-6
        assert box.y + box.height / 2 <= layout.height + 1e-6
        for other in boxes[:index]:
            apart = abs(box.x - other.x) >= (box.width + other.width) / 2 + 10 - 1e-6
            above = abs(box.y - other.y) >= (box.height + other.height) / 2 - 1e-6
            assert apart or above
        for source in box.inputs:
            points = layout.edges[source, index]
            assert points[0] == (boxes[source].x, boxes[source].y + boxes[source].height / 2)
            assert points[-1] == (box.x, box.y - box.height / 2)
            assert all(upper[1] < lower[1] for upper, lower in itertools.pairwise(points))


def test_a_chain_is_a_straight_line() -> None:
    boxes = [Box(40, 20, []), Box(80, 20, [0]), Box(40, 20, [1])]
    lay_out(boxes)
    assert len({round(box.x, 6) for box in boxes}) == 1


def test_parallel_chains_do_not_cross() -> None:
    # Two chains whose nodes are given in alternating order, joined at both ends.
    boxes = [Box(40, 20, []), *(Box(40, 20, [0]) for _ in range(2)), Box(40, 20, [2]), Box(40, 20, [1])]
    boxes.append(Box(40, 20, [4, 3]))
    lay_out(boxes)
    assert (boxes[1].x < boxes[2].x) == (boxes[4].x < boxes[3].x)


def test_nothing_is_laid_out_as_nothing() -> None:
    assert lay_out([]).width == 0
