"""`plancast zoo list | show | pull | remove`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from zoo.card import ModelCard
    from zoo.checkpoint import Checkpoint

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Model = Annotated[str, typer.Argument(help="A card's name, hub:owner/name[@revision], gguf:PATH, or a folder.")]


def register(app: typer.Typer) -> None:
    zoo = typer.Typer(help="Models: what is known, what is pulled.", no_args_is_help=True)
    zoo.command("list")(list_models)
    zoo.command("show")(show)
    zoo.command("pull")(pull)
    zoo.command("remove")(remove)
    app.add_typer(zoo, name="zoo")


def list_models(as_json: _Json = False) -> None:
    """List the model cards, and which models are pulled."""
    from zoo.card import load_cards
    from zoo.models import pulled

    records = {record["name"]: record for record in pulled() if record["present"]}
    cards = load_cards()
    if as_json:
        entries = [_card_dict(card, records.pop(card.name, None)) for card in cards.values()]
        entries += [{"name": name, "pulled": record} for name, record in records.items()]
        print(json.dumps(entries, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "params", "context", "license", "pulled from"):
        numeric = column in ("params", "context")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for card in cards.values():
        record = records.pop(card.name, None)
        license = f"{card.license} (gated)" if card.gated else card.license
        row = (card.name, _count(card.parameters), str(card.context_length), license)
        table.add_row(*row, record["source"] if record else "")
    for name, record in records.items():
        table.add_row(name, "", "", record["license"] or "", record["source"])
    _console().print(table)


def show(model: _Model, as_json: _Json = False) -> None:
    """Show a model card, or what lies in a folder, a GGUF file or a pulled model."""
    from zoo.card import load_cards
    from zoo.models import parse_model, pulled

    card = load_cards().get(model)
    if card is not None:
        record = next((record for record in pulled() if record["name"] == model), None)
        value = _card_dict(card, record)
    else:
        target = parse_model(model)
        if target.gguf is not None:
            value = _gguf_dict(target.gguf)
        elif target.folder is not None:
            from zoo.checkpoint import open_folder

            value = _checkpoint_dict(open_folder(target.folder, name=target.name, trust_remote_code=True))
        else:
            from zoo.models import recorded

            checkpoint = recorded(target, trust_remote_code=True)
            if checkpoint is None:
                from runtime.errors import ZooError

                raise ZooError(f"{model} is not pulled, and has no card: plancast zoo pull {model}")
            value = _checkpoint_dict(checkpoint)
    if as_json:
        print(json.dumps(value, indent=2))
        return
    if card is not None:  # hashes and pins are for machines
        value["sources"] = [f"{source.label} ({source.dtype})" for source in card.sources]
        value["pulled"] = value["pulled"] and f"{value['pulled']['source']} in {value['pulled']['folder']}"
    _print_value(value)


def pull(
    model: _Model,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Accept a model that brings Python code of its own.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Pull a model, or refresh it: its sources are asked first to last."""
    from zoo.models import pull as pull_model

    with _Bars() as progress:
        checkpoint = pull_model(model, trust_remote_code=trust_remote_code, progress=progress)
    if as_json:
        print(json.dumps(_checkpoint_dict(checkpoint), indent=2))
    else:
        revision = f" at {checkpoint.revision[:12]}" if checkpoint.revision else ""
        print(f"{checkpoint.name} from {checkpoint.source}{revision} in {checkpoint.folder}")


def remove(model: Annotated[str, typer.Argument(help="A name as `plancast zoo list` shows it.")]) -> None:
    """Delete what was pulled of a model. Engines built from it keep working."""
    from runtime.memory import format_size
    from zoo.models import remove as remove_model

    print(f"removed {model}, {format_size(remove_model(model))} freed")


class _Bars:
    """Progress for a terminal: one bar a task on stderr, notes above it; plain lines where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

        bytes_like, counted = DownloadColumn(binary_units=True), MofNCompleteColumn()

        class Done(TextColumn):
            def render(self, task: Any) -> Any:
                return (counted if task.fields["counted"] else bytes_like).render(task)

        console = _console(stderr=True)
        self.bars = Progress(TextColumn("{task.description}"), BarColumn(), Done(""), console=console, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        if self.bars.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def note(self, line: str) -> None:
        self.bars.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def update(self, task: str, done: int, total: int | None) -> None:
        if task not in self.tasks:
            for finished in self.tasks.values():
                self.bars.remove_task(finished)
            counted = not task.startswith(("fetching", "checking"))
            self.tasks = {task: self.bars.add_task(task, total=total, counted=counted)}
        self.bars.update(self.tasks[task], completed=done, total=total)


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120)


def _card_dict(card: ModelCard, record: dict[str, Any] | None) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(card), "pulled": record}


def _checkpoint_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = checkpoint.tensors().values()
    return {
        "name": checkpoint.name,
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "sha256": checkpoint.sha256,
        "license": checkpoint.license,
        "folder": str(checkpoint.folder),
        "family": checkpoint.config["model_type"],
        "context_length": checkpoint.context_length,
        "tensors": len(tensors),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "chat_template": checkpoint.chat_template is not None,
    }


def _gguf_dict(path: Any) -> dict[str, Any]:
    from collections import Counter

    from zoo.gguf_header import read_gguf_header

    header = read_gguf_header(path)
    return {
        "name": header.metadata.get("general.name"),
        "source": "gguf",
        "file": str(path),
        "license": header.metadata.get("general.license"),
        "family": header.architecture,
        "context_length": header.context_length,
        "parameters": header.num_elements,
        "tensors": len(header.tensors),
        "types": dict(Counter(tensor.type for tensor in header.tensors).most_common()),
        "chat_template": "tokenizer.chat_template" in header.metadata,
    }


def _print_value(value: dict[str, Any]) -> None:
    """One aligned line a fact; lists one entry a line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, item in value.items():
        if item is None or item == [] or item is False:
            continue
        entries = item if isinstance(item, list) else [item]
        for i, entry in enumerate(entries):
            table.add_row(key.replace("_", " ") if i == 0 else "", _in_line(entry))
    _console().print(table)


def _in_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return "yes" if value is True else str(value)


def _count(parameters: int) -> str:
    """135M, 1.2B."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 999_500_000 else f"{parameters / 1e6:.0f}M"
