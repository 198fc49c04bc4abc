"""Where to draw the nodes of a small directed acyclic graph: layers from top to bottom (Sugiyama's method).

Layers by longest path, long edges through dummy nodes, order by barycentres with the fewest crossings kept, and
coordinates by projecting each layer onto "in order, and far enough apart".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_ROUNDS = 24
_DUMMY_WIDTH = 12.0


@dataclass(slots=True)
class Box:
    """A node to place: its size, and the indices of the nodes it takes from. `x`, `y` are its centre, once placed."""

    width: float
    height: float
    inputs: list[int]
    x: float = 0.0
    y: float = 0.0


@dataclass(slots=True)
class Layout:
    """The extent, and for each edge (source, target) the points it passes, ends included."""

    width: float
    height: float
    edges: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)


def lay_out(boxes: list[Box], *, gap_x: float = 18.0, gap_y: float = 22.0) -> Layout:
    """Set `x` and `y` of each box and return the layout. `boxes` stand in topological order; sizes in pixels."""
    if not boxes:
        return Layout(0.0, 0.0)
    count = len(boxes)
    rank: list[int] = []
    for box in boxes:
        rank.append(1 + max((rank[i] for i in box.inputs), default=-1))
    placed = [Box(box.width, box.height, []) for box in boxes]
    chains: dict[tuple[int, int], list[int]] = {}
    for target, box in enumerate(boxes):
        for source in dict.fromkeys(box.inputs):
            chain = [source]
            for level in range(rank[source] + 1, rank[target]):
                placed.append(Box(_DUMMY_WIDTH, 0.0, [chain[-1]]))
                rank.append(level)
                chain.append(len(placed) - 1)
            placed[target].inputs.append(chain[-1])
            chains[source, target] = [*chain, target]
    outputs: list[list[int]] = [[] for _ in placed]
    for index, box in enumerate(placed):
        for source in box.inputs:
            outputs[source].append(index)

    layers = _order(placed, outputs, rank)
    _place_x(placed, outputs, layers, [chain[1:-1] for chain in chains.values()], gap_x)
    y = 0.0
    for layer in layers:
        height = max(placed[i].height for i in layer)
        for i in layer:
            placed[i].y = y + height / 2
        y += height + gap_y

    left = min(box.x - box.width / 2 for box in placed)
    for box in placed:
        box.x -= left
    for box, done in zip(boxes, placed[:count], strict=True):
        box.x, box.y = done.x, done.y
    layout = Layout(max(box.x + box.width / 2 for box in placed), y - gap_y)
    for edge, chain in chains.items():
        source, target = placed[chain[0]], placed[chain[-1]]
        points = [(source.x, source.y + source.height / 2)]
        points += [(placed[i].x, placed[i].y) for i in chain[1:-1]]
        points.append((target.x, target.y - target.height / 2))
        layout.edges[edge] = points
    return layout


def _order(boxes: list[Box], outputs: list[list[int]], rank: list[int]) -> list[list[int]]:
    """The boxes of each layer from left to right."""
    layers: list[list[int]] = [[] for _ in range(max(rank) + 1)]
    for index, level in enumerate(rank):
        layers[level].append(index)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, outputs)
    for turn in range(_ROUNDS):
        down = turn % 2 == 0
        for level in range(len(layers)) if down else range(len(layers) - 1, -1, -1):
            neighbours = [box.inputs for box in boxes] if down else outputs
            position = {i: k for layer in layers for k, i in enumerate(layer)}

            def weight(i: int, neighbours: list[list[int]] = neighbours, position: dict[int, int] = position) -> float:
                around = neighbours[i]
                return sum(position[n] for n in around) / len(around) if around else position[i]

            layers[level].sort(key=weight)
        crossings = _crossings(layers, outputs)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(layers: list[list[int]], outputs: list[list[int]]) -> int:
    """How often edges between neighbouring layers cross."""
    total = 0
    for upper, lower in itertools.pairwise(layers):
        position = {i: k for k, i in enumerate(lower)}
        ends = [sorted(position[j] for j in outputs[i] if j in position) for i in upper]
        seen: list[int] = []
        for group in ends:
            total += sum(1 for end in group for other in seen if other > end)
            seen += group
    return total


def _place_x(
    boxes: list[Box], outputs: list[list[int]], layers: list[list[int]], dummies: list[list[int]], gap: float
) -> None:
    chain_of = {i: chain if len(chain) > 1 else boxes[i].inputs + outputs[i] for chain in dummies for i in chain}
    for layer in layers:
        _spread(boxes, layer, [0.0] * len(layer), gap)
    for turn in range(_ROUNDS):
        for layer in layers if turn % 2 == 0 else reversed(layers):
            wanted = []
            for i in layer:
                if i in chain_of:  # a long edge is a straight line downwards
                    around = chain_of[i]
                else:  # a node sits below and above what it is joined to, neighbours before passing edges
                    joined = boxes[i].inputs + outputs[i]
                    around = [n for n in joined if n not in chain_of] or joined
                wanted.append(sum(boxes[n].x for n in around) / len(around) if around else boxes[i].x)
            _spread(boxes, layer, wanted, gap)


def _spread(boxes: list[Box], layer: list[int], wanted: list[float], gap: float) -> None:
    """Set the layer's x as near to `wanted` as order and distances allow: least squares, by pooling neighbours."""
    offsets = [0.0]
    for left, right in itertools.pairwise(layer):
        offsets.append(offsets[-1] + (boxes[left].width + boxes[right].width) / 2 + gap)
    pools: list[tuple[float, int]] = []  # (sum of targets, members); equal offsets within a pool
    for target, offset in zip(wanted, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, members = pools.pop()
            pools[-1] = (pools[-1][0] + total, pools[-1][1] + members)
    index = 0
    for total, members in pools:
        for _ in range(members):
            boxes[layer[index]].x = total / members + offsets[index]
            index += 1
