"""A trained head on disk: int8 weights, its shape, its tokens and its card; without what it reads of its target.

The weights are rounded as a build rounds int8 weights (a symmetric scale a channel), so nothing is lost twice.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from runtime.errors import PlancastError

if TYPE_CHECKING:
    from builder.drafts.head import EagleHead, HeadConfig
    from zoo.checkpoint import Checkpoint

HEADS = Path(__file__).resolve().parents[2] / "zoo" / "heads"  # those that ship
WEIGHTS, FACTS, CARD = "head.safetensors", "head.json", "README.md"
_SCALE = ".scale"


class HeadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """head.json. `shape`: the fields of `HeadConfig`; `target_ids`: the target's id of each of the head's tokens."""

    target: str  # the model that it was trained for
    shape: dict[str, Any]
    target_ids: Annotated[list[int], Meta(min_length=1)]
    accepted_by_position: list[float] = []  # of greedy drafts on held-out text
    training: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder that `save_head` wrote."""

    path: Path
    facts: HeadFacts


def save_head(head: EagleHead, facts: HeadFacts, folder: Path, card: str) -> None:
    """Write a head into `folder`, in place of what is there."""
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    for name, value in head.own_weights().items():
        array = value.detach().float().numpy()
        if array.ndim < 2:
            tensors[name] = array
            continue
        scale = np.maximum(np.abs(array).max(axis=1, keepdims=True), 1e-12) / 127.0
        tensors[name] = np.clip(np.rint(array / scale), -127, 127).astype(np.int8)
        tensors[name + _SCALE] = scale[:, 0].astype(np.float32)
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    (beside / FACTS).write_bytes(msgspec.json.encode(facts) + b"\n")
    save_file(tensors, beside / WEIGHTS)
    (beside / WEIGHTS).chmod((beside / FACTS).stat().st_mode)  # safetensors writes for its owner alone
    (beside / CARD).write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def find_head(name: str) -> HeadFolder:
    """The head in the folder `name`, or the shipped one of that name.

    Raises `PlancastError`: there is none, or what is there is none.
    """
    places = [Path(name).expanduser(), HEADS / name]
    folder = next((place for place in places if (place / FACTS).is_file()), None)
    if folder is None:
        shipped = ", ".join(sorted(path.parent.name for path in HEADS.glob(f"*/{FACTS}"))) or "none"
        looked = " and ".join(str(place / FACTS) for place in places)
        raise PlancastError(
            f"draft_head: no head {name!r}: looked for {looked}. Shipped: {shipped}. Train one: plancast draft train "
            "--kind head"
        )
    try:
        return HeadFolder(folder, msgspec.json.decode((folder / FACTS).read_bytes(), type=HeadFacts))
    except (msgspec.DecodeError, OSError) as error:
        raise PlancastError(f"{folder / FACTS}: no description of a head ({error})") from None


def head_hashes(name: str) -> dict[str, str]:
    """SHA-256 by name of the files that a build reads of the head `name`."""
    from runtime.artifact import sha256_of

    folder = find_head(name).path
    return {file: sha256_of(folder / file) for file in (WEIGHTS, FACTS)}


def load_head(folder: HeadFolder, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> EagleHead:
    """The head, with embedding and reading rows of the target in `checkpoint`.

    Raises `PlancastError`: damaged, or made for a model of other sizes.
    """
    from builder.drafts.head import EagleHead

    facts, config = folder.facts, read_shape(folder)
    head = EagleHead(config)
    read_weights(head, folder)
    embeddings, reading = _target_tables(checkpoint, trust_remote_code=trust_remote_code)
    wanted = (config.target_vocab_size, config.hidden_size)
    if embeddings.shape != wanted or reading.shape != wanted:
        raise PlancastError(
            f"draft_head: {folder.path.name} was made for {facts.target}, of {wanted[0]} tokens and hidden size "
            f"{wanted[1]}; {checkpoint.name} has {embeddings.shape[0]} and {embeddings.shape[1]}: "
            "train a head for it (plancast draft train --kind head), or do without: --set draft_head=null"
        )
    ids = facts.target_ids
    if len(ids) != config.vocab_size or not 0 <= min(ids) <= max(ids) < wanted[0]:
        raise PlancastError(
            f"{folder.path}: a damaged head: its target_ids are not {config.vocab_size} ids below {wanted[0]}"
        )
    import torch

    rows = np.ascontiguousarray(reading[facts.target_ids])
    head.adopt(torch.from_numpy(embeddings), torch.from_numpy(rows))
    return head.eval()


def read_shape(folder: HeadFolder) -> HeadConfig:
    """Raises `PlancastError`: damaged."""
    from builder.drafts.head import HeadConfig

    try:
        return msgspec.convert(folder.facts.shape, HeadConfig)
    except msgspec.ValidationError as error:
        raise PlancastError(f"{folder.path}: a damaged head ({error})") from None


def check_start(folder: HeadFolder, wanted: HeadConfig) -> None:
    """Raises `PlancastError` where a head of the shape `wanted` cannot begin as the head in `folder` (see
    `read_weights`): it is damaged, or of another shape."""
    import torch

    from builder.drafts.head import EagleHead

    config = read_shape(folder)
    free = ("vocab_size", "num_layers")
    apart = [
        name for name in config.__struct_fields__ if name not in free and getattr(config, name) != getattr(wanted, name)
    ]
    if apart:
        sizes = "; ".join(f"{name} is {getattr(config, name)}, not {getattr(wanted, name)}" for name in apart)
        raise PlancastError(f"{folder.path}: made for {folder.facts.target}, of another shape: {sizes}")
    if config.num_layers > wanted.num_layers:
        raise PlancastError(
            f"{folder.path}: has {config.num_layers} layers, and {wanted.num_layers} were asked for: give --layers "
            f"{config.num_layers} or more"
        )
    with torch.device("meta"):  # shapes alone: a target's embedding is large
        head = EagleHead(config)
    read_weights(head, folder)


def read_weights(head: EagleHead, folder: HeadFolder) -> None:
    """Give `head` the weights in `folder`; what it has of its target, its tokens among that, stays as it is.

    Where it has more layers than are there, the further ones let pass what they get: it says what the head there says.

    Raises `PlancastError`: damaged, or of another shape.
    """
    from builder.drafts.head import FROZEN

    further = list(head.layers)[read_shape(folder).num_layers :]
    for layer in further:
        layer.let_through()
    try:
        stored = _stored_weights(folder.path / WEIGHTS)
        if "q_proj.weight" in stored:  # heads of one layer did not number it, at first
            own = set(head.layers[0].state_dict())
            stored = {f"layers.0.{name}" if name in own else name: value for name, value in stored.items()}
        missing = head.load_state_dict(stored, strict=False, assign=True).missing_keys
    except (RuntimeError, ValueError, OSError) as error:
        raise PlancastError(f"{folder.path}: a damaged head, or one of another shape ({error})") from None
    known = {*FROZEN, *(f"layers.{layer.layer_idx}.{name}" for layer in further for name in layer.state_dict())}
    if absent := sorted(set(missing) - known):
        raise PlancastError(f"{folder.path}: a damaged head: {WEIGHTS} lacks {', '.join(absent)}")


def _stored_weights(path: Path) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    weights: dict[str, Any] = {}
    for name, array in stored.items():
        if not name.endswith(_SCALE):
            scale = stored.get(name + _SCALE)
            dense = array.copy() if scale is None else array.astype(np.float32) * scale[:, None]
            weights[name] = torch.from_numpy(dense)
    return weights


def _target_tables(checkpoint: Checkpoint, *, trust_remote_code: bool) -> tuple[np.ndarray, np.ndarray]:
    """The target's embedding and the weight of its head, f32 [V, H]."""
    from builder.tracing.capture import instantiate
    from builder.tracing.config import load_config
    from builder.tracing.weights import find_aliases, find_sources

    config = load_config(checkpoint, trust_remote_code=trust_remote_code)
    model: Any = instantiate(config, trust_remote_code=trust_remote_code)
    sources, aliases = find_sources(model, checkpoint), find_aliases(model)
    by_identity = {id(weight): name for name, weight in model.named_parameters()}
    tables = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = by_identity.get(id(getattr(module, "weight", None)))
        found = next((sources[alias] for alias in aliases.get(name or "", []) if alias in sources), None)
        if found is None:
            raise PlancastError(f"draft_head: {checkpoint.name} has no plain embedding and head: it cannot take a head")
        tables.append(np.ascontiguousarray(found.numpy().astype(np.float32)))
    return tables[0], tables[1]
