"""Where the values between segments lie in one device allocation: a value's bytes are used again when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.executors.segments.plan import SegmentPlan

ALIGNMENT = 256  # bytes: what device allocators give, and kernels may count on


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Arena:
    """Offsets of values in one allocation of `size` bytes."""

    offsets: Mapping[str, int]
    size: int


def plan_arena(plan: SegmentPlan, tokens: int, rows: int) -> Arena:
    """Place every value for steps of up to `tokens` tokens and `rows` rows. Values that live at once do not overlap.

    Segment i runs at time 2 i, the attention after it at 2 i + 1.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def touch(name: str | None, time: int) -> None:
        if name in plan.values:
            first.setdefault(name, time)
            last[name] = time

    for i, segment in enumerate(plan.segments):
        for name in (*segment.inputs, *segment.outputs):
            touch(name, 2 * i)
        for layer in plan.attentions[i : i + 1]:
            for name in (layer.query, layer.key, layer.value, layer.sinks, layer.alibi_slopes, layer.output):
                touch(name, 2 * i + 1)
    end = 2 * len(plan.segments)
    for name in plan.segments[-1].outputs:
        last[name] = end  # read by whoever samples
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, str]] = []  # offset, size
    for name in sorted(first, key=lambda n: (-plan.values[n].nbytes(tokens, rows), n)):
        size = aligned(max(1, plan.values[name].nbytes(tokens, rows)))
        offset = 0
        for other, length, owner in sorted(placed):
            if last[owner] < first[name] or last[name] < first[owner]:
                continue
            if offset + size <= other:
                break
            offset = max(offset, other + length)
        offsets[name] = offset
        placed.append((offset, size, name))
    return Arena(offsets, max((offset + size for offset, size, _ in placed), default=0))
