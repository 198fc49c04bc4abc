"""The iteration log as a picture: requests over time, the tokens of each step, and the KV cache's occupancy."""

from __future__ import annotations

from collections.abc import Callable

from runtime.svg import FAINT, FONT, INK, Svg
from runtime.trace_view import DECODE, PREEMPTED, PREFILL, WAITING, Trace, format_figure, step_end, summarize

COLOURS = {WAITING: "#e5e7eb", PREFILL: "#2563eb", DECODE: "#34d399", PREEMPTED: "#f87171"}
USED, IDLE = "#7c3aed", "#ddd6fe"
MAX_ROWS = 150  # sequences drawn; a picture of thousands shows nothing
_LEFT, _RIGHT, _WIDTH = 130, 20, 1200
_CHART, _GAP = 90, 34


def draw(trace: Trace) -> str:
    """The picture as an SVG document."""
    rows = [sequence for life in trace.requests for sequence in life.sequences.values()]
    shown = rows[:MAX_ROWS]
    row_height = max(4, min(16, 900 // max(1, len(shown))))
    timeline = row_height * len(shown)
    svg = Svg(_WIDTH, 70 + timeline + 2 * (_CHART + _GAP) + 50)
    begin, seconds = (trace.steps[0].t if trace.steps else 0.0), max(trace.seconds, 1e-9)
    begin = min([begin, *(life.arrival for life in trace.requests if life.arrival >= 0)])
    scale = (_WIDTH - _LEFT - _RIGHT) / (seconds - begin)

    def at(t: float) -> float:
        return _LEFT + (max(t, begin) - begin) * scale

    _heading(svg, trace, len(rows))
    y = 62.0
    for sequence in shown:
        name = sequence.request_id if sequence.index == 0 else f"{sequence.request_id} [{sequence.index}]"
        if row_height >= 7:
            svg.text(_LEFT - 6, y + row_height * 0.75, name[-18:], size=min(10, row_height - 1), anchor="end")
        for phase in sequence.phases:
            told = f"{name}: {phase.kind}, {phase.end - phase.start:.3f} s"
            told += f", {phase.tokens} tokens in {phase.steps} steps" if phase.steps else ""
            width = (phase.end - phase.start) * scale
            svg.rect(at(phase.start), y, width, row_height - 1, COLOURS[phase.kind], told)
        y += row_height
    y += _GAP
    _tokens_chart(svg, trace, at, y)
    y += _CHART + _GAP
    _blocks_chart(svg, trace, at, y)
    svg.axis(_LEFT, y + _CHART + 2, _WIDTH - _LEFT - _RIGHT, seconds - begin, "seconds")
    return svg.render()


def draw_page(trace: Trace) -> str:
    """The picture on a page of its own, with the summary under it."""
    rows = "".join(
        f"<tr><td>{name.replace('_', ' ')}</td><td>{format_figure(value)}</td></tr>"
        for name, value in summarize(trace).items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>plancast trace</title>'
        f"<style>body{{font-family:{FONT};color:{INK};margin:2em}}svg{{max-width:100%;height:auto}}"
        "td{padding:.15em 1em .15em 0}td+td{text-align:right;font-variant-numeric:tabular-nums}</style>"
        f"{draw(trace)}<table>{rows}</table></html>\n"
    )


def _heading(svg: Svg, trace: Trace, num_rows: int) -> None:
    header, figures = trace.header, summarize(trace)
    svg.text(_LEFT, 22, f"{len(trace.requests)} requests, {len(trace.steps)} steps", size=15, bold=True)
    svg.text(
        _LEFT,
        40,
        f"{figures['output_tokens_per_second']:.1f} output tokens/s, TTFT {figures['ttft_median']:.3f} s median, "
        f"{figures['preemptions']} preemptions, {header.batching} batching, {header.scheduling_policy}",
        fill=FAINT,
    )
    if num_rows > MAX_ROWS:
        svg.text(_LEFT, 54, f"the first {MAX_ROWS} of {num_rows} sequences", size=10, fill=FAINT)
    x = _WIDTH - _RIGHT - 420
    for kind, colour in COLOURS.items():
        svg.rect(x, 13, 10, 10, colour)
        svg.text(x + 14, 22, kind)
        x += 100


def _tokens_chart(svg: Svg, trace: Trace, at: Callable[[float], float], y: float) -> None:
    most = max((step.decode_tokens + step.prefill_tokens for step in trace.steps), default=1)
    svg.text(_LEFT - 6, y + 10, "tokens a step", size=10, anchor="end")
    svg.text(_LEFT - 6, y + 24, f"at most {most:,}", size=10, anchor="end", fill=FAINT)
    for step in trace.steps:
        x, width = at(step.t), at(step_end(step)) - at(step.t)
        decode = _CHART * step.decode_tokens / most
        prefill = _CHART * step.prefill_tokens / most
        told = f"step {step.step}: {step.decode_tokens} decode and {step.prefill_tokens} prefill tokens"
        if prefill:
            svg.rect(x, y + _CHART - decode - prefill, width, prefill, COLOURS[PREFILL], told)
        if decode:
            svg.rect(x, y + _CHART - decode, width, decode, COLOURS[DECODE], told)


def _blocks_chart(svg: Svg, trace: Trace, at: Callable[[float], float], y: float) -> None:
    total = trace.header.num_blocks
    used = [(step, total - step.free_blocks) for step in trace.steps]
    most = max((count + step.idle_blocks for step, count in used), default=1) or 1
    svg.text(_LEFT - 6, y + 10, "KV blocks", size=10, anchor="end")
    svg.text(_LEFT - 6, y + 24, f"{most:,} of {total:,}", size=10, anchor="end", fill=FAINT)
    svg.text(_LEFT - 6, y + 40, "used", size=10, anchor="end", fill=USED)
    svg.text(_LEFT - 6, y + 54, "cached", size=10, anchor="end", fill="#a78bfa")
    base = y + _CHART

    def outline(heights: list[int]) -> list[tuple[float, float]]:
        points = []
        for (step, _), height in zip(used, heights, strict=True):
            level = base - _CHART * height / most
            points += [(at(step.t), level), (at(step_end(step)), level)]
        return points

    svg.area(outline([count + step.idle_blocks for step, count in used]), base, IDLE)
    svg.area(outline([count for _, count in used]), base, USED)
