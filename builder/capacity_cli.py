"""`plancast plan`: what fits into a memory, before anything is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from builder.capacity import Capacity


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: Annotated[str, typer.Argument(help="A config.json or its folder, a zoo card, or hub:owner/name.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of the device.")] = "80GB",
    context: Annotated[int, typer.Option(min=1, help="Tokens that a request may take, prompt and answer.")] = 4096,
    kv: Annotated[
        list[str] | None, typer.Option(help="KV format: f32, f16, bf16, int8, fp8, int4; repeat for several.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Weights: f32, f16, bf16, int8, fp8 or int4.")] = "bf16",
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a request holds on average. Default: half the context.")
    ] = None,
    memory_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the memory that may be taken.")
    ] = 0.9,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 16,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw concurrency against context, a line a KV format.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a deployment: weights, KV bytes a token, concurrent requests with and without paging. Needs no weights."""
    from builder import capacity as planner
    from builder.stages import require_libraries
    from runtime.errors import PlancastError
    from runtime.memory import parse_size

    if weights not in planner.WEIGHT_BITS:
        raise PlancastError(f"--weights {weights!r} is not known; allowed: {', '.join(planner.WEIGHT_BITS)}")
    formats = tuple(dict.fromkeys(planner.KV_ALIASES.get(name, name) for name in kv or planner.KV_FORMATS))
    for name in formats:
        if name not in planner.KV_FORMATS:
            known = ", ".join([*planner.KV_FORMATS, *planner.KV_ALIASES])
            raise PlancastError(f"--kv {name!r} is not known; allowed: {known}")
    nbytes = parse_size(memory)
    require_libraries()
    name, config = planner.load_config(model)
    shape = planner.read_shape(config, name)

    def at(tokens: int) -> Capacity:
        return planner.plan_capacity(
            shape,
            memory=nbytes,
            context=tokens,
            weights=weights,
            share=memory_share,
            mean_tokens=mean_tokens if tokens == context else None,
            block_size=block_size,
            formats=formats,
        )

    found = at(context)
    if plot is not None:
        contexts = [2**power for power in range(9, 18)]
        try:
            plot.write_text(_draw([at(tokens) for tokens in contexts]), encoding="utf-8")
        except OSError as error:
            raise PlancastError(f"{plot}: cannot be written ({error.strerror})") from None
    print(json.dumps(planner.describe(found), indent=2)) if as_json else _print(found)


def _print(found: Capacity) -> None:
    from rich.console import Console
    from rich.table import Table

    console, shape = Console(), found.shape
    console.print(
        f"{shape.name}: {shape.parameters:,} parameters, {_decimal(found.weight_bytes)} as {found.weights}; "
        f"{len(shape.layers)} layers with a KV cache",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    left = found.usable - found.weight_bytes
    console.print(
        f"memory: {_decimal(found.memory)}, {_decimal(found.usable)} may be taken, {_decimal(max(0, left))} for KV",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if left <= 0:
        devices = -(-found.weight_bytes // found.usable)
        console.print(
            f"the weights alone do not fit: {devices} such devices hold them, or narrower weights (--weights int4)",
            style="red",
            markup=False,
        )
    if shape.context_length and found.context > shape.context_length:
        console.print(f"note: the model was made for {shape.context_length} tokens", style="yellow", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in (
        "KV",
        "a token",
        f"{found.context} tokens",
        "requests: unpaged",
        "paged",
        f"paged at {found.mean_tokens}",
    ):
        table.add_column(column, justify="left" if column == "KV" else "right")
    for fit in found.fits:
        table.add_row(
            fit.kv,
            _decimal(fit.bytes_per_token),
            _decimal(fit.bytes_per_sequence),
            f"{fit.reserved:,}",
            f"{fit.paged_full:,}",
            f"{fit.paged_mean:,}",
        )
    console.print(table)
    console.print(
        f"unpaged: each request reserves {found.context} tokens; paged: blocks of {found.block_size} tokens, every "
        f"request full, or holding {found.mean_tokens} tokens",
        style="dim",
        soft_wrap=True,
        highlight=False,
    )


def _draw(plans: list[Capacity]) -> str:
    from runtime.chart import Axis, Series, chart

    first = plans[0]
    series = [
        Series(fit.kv, [(plan.context, plan.fits[index].paged_full) for plan in plans])
        for index, fit in enumerate(first.fits)
    ]
    title = f"{first.shape.name}, {first.weights} weights, {_decimal(first.memory)}"
    return chart(title, Axis("context, tokens", log=True), Axis("concurrent requests, all full", log=True), series)


def _decimal(size: int) -> str:
    """Bytes in decimal units, as memory is sold: 2.62 MB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} bytes" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
