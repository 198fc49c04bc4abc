"""Draw one decoder layer before and after fusion, side by side, as an SVG of its own making."""

from __future__ import annotations

import itertools
from html import escape

from builder.graph_layout import Box, lay_out
from builder.layer_graph import Graphs, LayerGraph, LayerNode

_FONT = "ui-sans-serif, system-ui, 'Helvetica Neue', Arial, sans-serif"
_MARGIN, _TITLE, _BETWEEN, _LEGEND = 28, 96, 72, 44
_MAX_TEXT = 46  # characters of a line

# What an operator is for: fill and border.
_KINDS = {
    "matrix product": ("#dbeafe", "#2563eb"),
    "attention": ("#ffedd5", "#ea580c"),
    "normalization": ("#dcfce7", "#16a34a"),
    "rotary embedding": ("#f3e8ff", "#9333ea"),
    "elementwise": ("#fef9c3", "#a16207"),
    "shape": ("#f3f4f6", "#9ca3af"),
    "input": ("#ffffff", "#374151"),
}
_KIND_OF = {
    "MatMul": "matrix product",
    "Gemm": "matrix product",
    "MatMulNBits": "matrix product",
    "MoEExperts": "matrix product",
    "PagedAttention": "attention",
    "RMSNormalization": "normalization",
    "LayerNormalization": "normalization",
    "RotaryEmbedding": "rotary embedding",
    **dict.fromkeys(
        ("Reshape", "Transpose", "Slice", "Concat", "Split", "Unsqueeze", "Squeeze", "Cast", "Gather", "Expand"),
        "shape",
    ),
}


def draw(graphs: Graphs, title: str) -> str:
    """An SVG document: the layer as traced on the left, as compiled on the right."""
    left, left_width, left_height = _panel(graphs.traced)
    right, right_width, right_height = _panel(graphs.fused)
    before, after = len(graphs.traced.nodes), len(graphs.fused.nodes)
    left_width, right_width = max(left_width, 240.0), max(right_width, 240.0)
    width = 2 * _MARGIN + left_width + _BETWEEN + right_width
    legend_width, legend = _legend(
        sorted({_kind(node) for graph in (graphs.traced, graphs.fused) for node in graph.nodes})
    )
    width = max(width, 2 * _MARGIN + legend_width)
    height = _TITLE + max(left_height, right_height) + _LEGEND + _MARGIN
    middle = _MARGIN + left_width + _BETWEEN / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{escape(_FONT)}">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0.5 L8 4 L0 7.5 z" fill="#6b7280"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(_MARGIN, 34, title, size=18, weight=600),
        _text(_MARGIN, 66, f"as traced: {_count(before)}", size=14, color="#374151"),
        _text(middle + _BETWEEN / 2, 66, f"as compiled: {_count(after)}", size=14, color="#374151"),
        f'<line x1="{middle:.0f}" y1="52" x2="{middle:.0f}" y2="{height - _LEGEND - _MARGIN:.0f}" '
        'stroke="#d1d5db" stroke-dasharray="4 4"/>',
        f'<g transform="translate({_MARGIN} {_TITLE})">{left}</g>',
        f'<g transform="translate({middle + _BETWEEN / 2:.0f} {_TITLE})">{right}</g>',
        f'<g transform="translate({_MARGIN} {height - _LEGEND:.0f})">{legend}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(graph: LayerGraph) -> tuple[str, float, float]:
    """The drawing of one graph, its width and height. The first input, the residual stream, is a node of its own."""
    lines: list[list[str]] = [[graph.inputs[0]]] if graph.inputs else []
    shift = len(lines)
    boxes = [Box(_width(lines[0], "from the layer before"), 26, [])] if lines else []
    for node in graph.nodes:
        texts = [node.op, *_details(node, graph)]
        lines.append(texts)
        inputs = [i + shift if i >= 0 else 0 for i in node.inputs if i >= -1]
        boxes.append(Box(_width(texts), 12 + 14 * len(texts), inputs))
    layout = lay_out(boxes)
    parts = [_path(points) for points in layout.edges.values()]
    for index, (box, texts) in enumerate(zip(boxes, lines, strict=True)):
        kind = "input" if index < shift else _kind(graph.nodes[index - shift])
        if index < shift:
            texts = ["from the layer before"]
        parts.append(_box(box, texts, kind, graph.nodes[index - shift].shape if index >= shift else ""))
    return "\n".join(parts), layout.width, layout.height


def _details(node: LayerNode, graph: LayerGraph) -> list[str]:
    """What a node reads besides other nodes: its weights, and inputs of the whole graph."""
    names = [graph.inputs[-1 - i] for i in node.inputs if i < -1]
    lines = [_short(weight) for weight in node.weights[:3]]
    row = ""
    for name in names:
        if row and len(row) + len(name) > _MAX_TEXT - 8:
            lines.append(row + ",")
            row = ""
        row = f"{row}, {name}" if row else name
    return [*lines, row] if row else lines


def _kind(node: LayerNode) -> str:
    return _KIND_OF.get(node.op, "elementwise")


def _width(lines: list[str], *more: str) -> float:
    return 22 + max(
        [
            8.0 * len(lines[0]) if not more else 0.0,
            *(6.1 * len(line) for line in lines[1:]),
            *(7.0 * len(m) for m in more),
        ]
    )


def _box(box: Box, lines: list[str], kind: str, shape: str) -> str:
    fill, stroke = _KINDS[kind]
    left, top = box.x - box.width / 2, box.y - box.height / 2
    dash = ' stroke-dasharray="3 3"' if kind == "input" else ""
    parts = [
        f"<g><title>{escape(' '.join(filter(None, [lines[0], shape])))}</title>",
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
        f'fill="{fill}" stroke="{stroke}"{dash}/>',
        _text(box.x, top + 17, lines[0], size=13, weight=500, anchor="middle"),
    ]
    parts += [
        _text(box.x, top + 17 + 14 * row, line, size=11, color="#4b5563", anchor="middle")
        for row, line in enumerate(lines[1:], 1)
    ]
    return "".join(parts) + "</g>"


def _path(points: list[tuple[float, float]]) -> str:
    """A smooth line through the points, leaving and arriving vertically."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="#9ca3af" stroke-width="1.2" marker-end="url(#arrow)"/>'


def _legend(kinds: list[str]) -> tuple[float, str]:
    parts, x = [], 0.0
    for kind in [name for name in _KINDS if name in kinds]:
        fill, stroke = _KINDS[kind]
        parts.append(f'<rect x="{x:.0f}" y="0" width="14" height="14" rx="3" fill="{fill}" stroke="{stroke}"/>')
        parts.append(_text(x + 20, 12, kind, size=12, color="#374151"))
        x += 44 + 6.8 * len(kind)
    return x, "".join(parts)


def _text(
    x: float, y: float, text: str, *, size: int, weight: int = 400, color: str = "#111827", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"…{text[1 - _MAX_TEXT :]}"


def _count(nodes: int) -> str:
    return f"{nodes} operator{'' if nodes == 1 else 's'}"
