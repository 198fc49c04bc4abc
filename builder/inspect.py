"""What an artifact is, for people and for programs: `plancast inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from builder.layer_graph import GRAPH_NAME, Graphs
from runtime.artifact import Artifact, read_manifest
from runtime.errors import ArtifactError
from runtime.executors.segments.plan import read_plan
from runtime.manifest import EmbeddingInfo, Manifest, Parity, rebuild_hint
from runtime.memory import format_size

if TYPE_CHECKING:
    from rich.console import Console


def describe(folder: Path) -> dict[str, Any]:
    """The manifest of the artifact in `folder` as plain values, with what follows from it under `derived`.

    An artifact that would not load here is described all the same; `derived.problem` then says why not.

    Raises:
        ArtifactError: there is no artifact, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    problem, notes = None, ()
    try:
        notes = Artifact.open(folder).notes
    except ArtifactError as error:
        problem = str(error)
    kv = manifest.kv
    return {
        **msgspec.to_builtins(manifest),
        "derived": {
            "path": str(folder.resolve()),
            "problem": problem,
            "notes": list(notes),
            "files_bytes": sum(info.bytes for info in manifest.files.values()),
            "weights_bytes": sum(manifest.weights_bytes.values()),
            "kv_bytes_per_token": kv.bytes_per_token,
            "kv_bytes_per_block": kv.bytes_per_block,
            "kv_bytes_per_sequence": kv.bytes_per_block * -(-manifest.limits.max_context_len // kv.block_size),
            "kv_bytes_per_token_by_kind": kv_bytes_by_kind(manifest),
        },
    }


def kv_bytes_by_kind(manifest: Manifest) -> dict[str, int]:
    """Bytes that one token takes in all layers, by what they hold: `key f32`, `value f32`, `scale`."""
    total: dict[str, int] = {}
    for layer in manifest.kv.layers:
        scales = layer.num_kv_heads * (layer.key_scale_bytes + layer.value_scale_bytes)
        keys = msgspec.structs.replace(layer, value_head_size=0, key_scale_bytes=0, value_scale_bytes=0)
        values = msgspec.structs.replace(layer, key_head_size=0, key_scale_bytes=0, value_scale_bytes=0)
        for kind, size in (
            (f"key {layer.key_dtype}", keys.bytes_per_token),
            (f"value {layer.value_dtype}", values.bytes_per_token),
            ("scale", scales),
        ):
            if size:
                total[kind] = total.get(kind, 0) + size
    return total


def load_graphs(folder: Path) -> Graphs:
    """The layer in the artifact `folder`, as traced and as compiled. Raises `ArtifactError` where it is not there."""
    path = folder / GRAPH_NAME
    name = read_manifest(folder).name
    try:
        return msgspec.json.decode(path.read_bytes(), type=Graphs)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); {rebuild_hint(name)}") from None


def show(folder: Path, console: Console) -> None:
    """Print the artifact in `folder`. Raises as `describe`."""
    facts = describe(folder)
    manifest = msgspec.convert({key: value for key, value in facts.items() if key != "derived"}, Manifest)
    derived = facts["derived"]
    model, backend, limits, kv = manifest.model, manifest.backend, manifest.limits, manifest.kv
    console.rule(f"[bold]{manifest.name}[/]", align="left")
    if derived["problem"]:
        console.print(f"does not load here: {derived['problem']}", style="red", markup=False)
    for note in derived["notes"]:
        console.print(note, style="yellow", markup=False)
    _table(
        console,
        None,
        [
            ("model", f"{model.name}, {model.architecture}, {model.num_parameters:,} parameters"),
            ("source", model.source + (f" at {model.revision}" if model.revision else "")),
            ("source sha256", model.sha256 or "not known"),
            ("licence", model.license or "not stated"),
            ("backend", f"{backend.name} {backend.version}, {backend.device}"),
            ("loads from", _loads_from(manifest)),
            ("hardware", " ".join([manifest.hardware.machine, *manifest.hardware.isa, *_capabilities(manifest)])),
            ("plugins", ", ".join(f"{name} v{version}" for name, version in manifest.plugins.items()) or "none"),
            ("draft head", _draft_head(manifest)),
            ("recipe", f"{manifest.recipe.get('name')} ({manifest.recipe_hash[:12]})"),
            ("built", f"{manifest.created} by plancast {manifest.plancast_version}"),
            ("on disk", f"{format_size(derived['files_bytes'])} in {len(manifest.files)} files"),
        ],
    )
    _table(
        console,
        "limits",
        [
            ("context", f"{limits.max_context_len} tokens (the model: {model.context_length})"),
            ("sequences a step", str(limits.max_num_seqs)),
            ("tokens a step", str(limits.max_num_batched_tokens)),
        ],
    )
    weights = [(kind, format_size(size)) for kind, size in manifest.weights_bytes.items()]
    _table(console, "weights", [*weights, ("in all", format_size(derived["weights_bytes"]))])
    cells = [(kind, f"{format_size(size)} a token") for kind, size in derived["kv_bytes_per_token_by_kind"].items()]
    _table(
        console,
        "KV cache",
        [
            *cells,
            ("a block", f"{kv.block_size} tokens, {format_size(derived['kv_bytes_per_block'])}"),
            ("a full sequence", format_size(derived["kv_bytes_per_sequence"])),
            ("layers", str(len(kv.layers))),
        ],
    )
    _segments(console, folder, manifest)
    _operators(console, manifest)
    if manifest.embedding is None:
        _parity(console, manifest.parity)
    else:
        _embedding(console, manifest.embedding)
    seconds = manifest.build.get("seconds", {})
    peaks = manifest.build.get("peak_memory", {})
    rows = [(name, f"{value:.1f} s, {format_size(peaks.get(name, 0))}") for name, value in seconds.items()]
    if rows:
        total = (
            f"{manifest.build.get('total_seconds', 0):.1f} s, {format_size(manifest.build.get('max_memory', 0))} peak"
        )
        _table(console, "build", [*rows, ("in all", total)])


def _capabilities(manifest: Manifest) -> list[str]:
    return manifest.backend.properties.get("compute_capabilities", "").split()


def _loads_from(manifest: Manifest) -> str:
    backend = manifest.backend
    if _capabilities(manifest):
        return f"{backend.engine} (engines and kernels, compiled)"
    if backend.plan:
        return f"{backend.plan} (compiled, for any {manifest.hardware.machine} CPU)"
    return f"{backend.blob} (compiled)" if backend.blob else f"{backend.engine} (compiled at load)"


def _segments(console: Console, folder: Path, manifest: Manifest) -> None:
    """The engines and kernels of an artifact of segments; of other artifacts nothing."""
    if not _capabilities(manifest):
        return
    from rich.table import Table

    plan = read_plan(folder / manifest.backend.engine, rebuild_hint(manifest.name))
    table = Table(title="segments", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("engine", "layers", "size", "built in", "tensors in", "out"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for segment in plan.segments:
        tensors = str(len(segment.inputs)), str(len(segment.outputs))
        row = (segment.file, str(segment.layers), format_size(segment.bytes), f"{segment.seconds:.1f} s", *tensors)
        table.add_row(*row)
    total, seconds = sum(s.bytes for s in plan.segments), sum(s.seconds for s in plan.segments)
    table.add_row(
        "in all", str(sum(s.layers for s in plan.segments)), format_size(total), f"{seconds:.1f} s", style="bold"
    )
    console.print(table)
    console.print()
    table = Table(title="kernels", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("kernel", "warps", "parameters", "constants", "compiled for: PTX, shared memory"):
        table.add_column(name)
    for name, kernel in plan.kernels.items():
        images = [
            f"{capability}: {format_size((folder / image.file).stat().st_size)}, {format_size(image.shared)}"
            for capability, image in kernel.images.items()
        ]
        constants = ", ".join(f"{key} {value}" for key, value in kernel.constants.items())
        table.add_row(name, str(kernel.num_warps), str(len(kernel.parameters)), constants, "; ".join(images))
    console.print(table)
    console.print()


def _operators(console: Console, manifest: Manifest) -> None:
    from rich.table import Table

    table = Table(title="operators", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("type")
    table.add_column("traced", justify="right")
    table.add_column("compiled", justify="right")
    before, after = manifest.operators_traced, manifest.operators
    for name in sorted({*before, *after}, key=lambda name: (-after.get(name, 0), -before.get(name, 0), name)):
        table.add_row(name, str(before.get(name, "")), str(after.get(name, "")))
    table.add_row("in all", str(sum(before.values())), str(sum(after.values())), style="bold")
    console.print(table)
    console.print()


def _parity(console: Console, parity: Parity | None) -> None:
    if parity is None:
        _table(console, "parity", [("not compared", "parity.enabled was false")])
        return
    same = f"{parity.greedy_matching_prompts} of {parity.greedy_prompts} prompts identical"
    _table(
        console,
        "parity with Hugging Face transformers in f32",
        [
            ("greedy", f"{same}; {parity.greedy_matching_tokens} of {parity.greedy_tokens} tokens up to a difference"),
            ("KL divergence", f"{parity.mean_kl:.3g} nats on average, {parity.p99_kl:.3g} at the 99th percentile"),
            ("top-1 agreement", f"{parity.top1_agreement:.2%} of {parity.positions} positions"),
            ("perplexity", f"{parity.perplexity:.6g} (reference {parity.reference_perplexity:.6g})"),
        ],
    )


def _embedding(console: Console, embedding: EmbeddingInfo) -> None:
    pooled = f"{embedding.pooling}{', to length 1' if embedding.normalize else ''}"
    rows = [("vector", f"{embedding.size} entries"), ("pooling", pooled)]
    if (parity := embedding.parity) is None:
        rows.append(("not compared", "parity.enabled was false"))
    else:
        rows += [
            (
                "cosine with transformers",
                f"{parity.mean_cosine:.6f} on average, {parity.min_cosine:.6f} at least ({parity.prompts} prompts)",
            ),
            (
                "cosine of hidden states",
                f"{parity.hidden_mean_cosine:.6f} on average, {parity.hidden_min_cosine:.6f} at least "
                f"({parity.positions} tokens)",
            ),
        ]
    _table(console, "embedding", rows)


def _table(console: Console, title: str | None, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", min_width=16)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
    console.print()


def _draft_head(manifest: Manifest) -> str:
    head = manifest.draft_head
    if head is None:
        return "none"
    shares = " ".join(f"{share:.0%}" for share in head.accepted_by_position)
    return f"{head.name}, accepted on held-out text by position: {shares or 'not known'}"
