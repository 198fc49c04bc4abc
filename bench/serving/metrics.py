"""From replies to figures, under the names that vLLM's benchmark gives them. Latencies are in milliseconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.serving.client import Reply
from runtime.errors import PlancastError

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated, as NumPy's; `share` from 0 to 1. NaN where there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` as limits in milliseconds. Raises `PlancastError` for anything else."""
    found: dict[str, float] = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in ("ttft", "tpot", "e2el") or not found[name] > 0:
            raise PlancastError(f"goodput {limit!r}: give ttft, tpot or e2el and milliseconds, such as ttft:200")
    return found


def latencies(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """Milliseconds by kind: one a reply; `itl` one a gap between events; `tpot` only of replies with several tokens."""
    return {
        "ttft": [reply.ttft * 1e3 for reply in replies],
        "tpot": [reply.tpot * 1e3 for reply in replies if reply.output_tokens > 1],
        "itl": [gap * 1e3 for reply in replies for gap in reply.gaps],
        "e2el": [reply.latency * 1e3 for reply in replies],
    }


def summarize(replies: Sequence[Reply], duration: float, goodput: dict[str, float]) -> dict[str, Any]:
    """The figures of one run of `duration` seconds, failed replies left out of all but their count."""
    good = [reply for reply in replies if reply.error is None]
    inputs, outputs = (sum(getattr(reply, name) for reply in good) for name in ("prompt_tokens", "output_tokens"))
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": peak_concurrency(good),
    }
    if goodput:
        kept = sum(meets(reply, goodput) for reply in good)
        figures |= {"request_goodput": kept / duration, "goodput_share": kept / max(1, len(replies))}
    for name, values in latencies(good).items():
        figures |= {
            f"mean_{name}_ms": statistics.fmean(values) if values else math.nan,
            f"median_{name}_ms": percentile(values, 0.5),
            f"std_{name}_ms": statistics.pstdev(values) if values else math.nan,
            f"p99_{name}_ms": percentile(values, 0.99),
        }
    return figures


def meets(reply: Reply, goodput: dict[str, float]) -> bool:
    """Whether a reply keeps every limit (milliseconds)."""
    figures = {"ttft": reply.ttft, "tpot": reply.tpot, "e2el": reply.latency}
    return all(figures[name] * 1e3 <= limit for name, limit in goodput.items())


def peak_concurrency(replies: Sequence[Reply]) -> int:
    """The most requests that were under way at once."""
    edges = sorted([(r.started, 1) for r in replies] + [(r.started + r.latency, -1) for r in replies])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def timeline(replies: Sequence[Reply], begin: float, bins: int = 120) -> dict[str, list[float]]:
    """The run in equal parts: `seconds` (their middles), `tokens_per_second`, `running` (mean requests under way)."""
    end = max((reply.started + reply.latency for reply in replies), default=begin)
    width = max(end - begin, 1e-9) / bins
    tokens, running = [0.0] * bins, [0.0] * bins
    for reply in replies:
        share = reply.output_tokens / len(reply.times) if reply.times else 0.0
        for at in reply.times:
            tokens[min(bins - 1, int((reply.started + at - begin) / width))] += share
        first, last = (reply.started - begin) / width, (reply.started + reply.latency - begin) / width
        for part in range(max(0, int(first)), min(bins - 1, int(last)) + 1):
            running[part] += max(0.0, min(last, part + 1) - max(first, part))
    return {
        "seconds": [(part + 0.5) * width for part in range(bins)],
        "tokens_per_second": [count / width for count in tokens],
        "running": running,
    }
