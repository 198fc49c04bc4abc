"""A checkpoint: a Hugging Face style folder on disk, checked, whatever source it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import ZooError
from zoo.card import ModelCard
from zoo.formats.packed import read_quantization
from zoo.formats.side_file import NAME as QUANTIZED
from zoo.formats.side_file import read_side_file
from zoo.hashing import sha256_file, sha256_text
from zoo.progress import Progress
from zoo.quantized import QuantizedRef
from zoo.safetensors_header import TensorRef, read_safetensors_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What a model needs beside its weights. Everything but config.json and tokenizer.json is optional.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    # Of a draft that `plancast draft train` made.
    "draft_vocabulary.json",
    "draft_card.md",
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model to build from.

    `source` says where its weights came from (hub:owner/name, folder, gguf, package:name==version) and `revision` at
    which commit; `sha256` is that of the source's weights. Two sources of one model can hold different weights.
    """

    name: str
    folder: Path
    source: str
    revision: str | None
    sha256: str | None
    license: str | None
    config: dict[str, Any]
    card: ModelCard | None = None
    files: tuple[Path, ...] = field(default=(), repr=False)

    def weight_files(self) -> list[Path]:
        """The safetensors files, links resolved."""
        return list(self.files)

    def tensors(self) -> dict[str, TensorRef]:
        """Where each tensor lies, by its Hugging Face name."""
        return _read_tensors(self.folder, self.files)

    def quantized(self) -> dict[str, QuantizedRef]:
        """The weights that the checkpoint holds quantized, unread, by the names of the dense ones."""
        return read_side_file(self.folder)

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made for, where its config says so."""
        text = self.config.get("text_config") or self.config
        length = text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_seq_len")
        return length if isinstance(length, int) else self.card.context_length if self.card else None

    @property
    def chat_template(self) -> str | None:
        """The chat template (Jinja), from whichever file holds it."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = self.folder / name
            template = read_json(path).get("chat_template") if path.is_file() else None
            if isinstance(template, list):  # several, by name
                template = next((t.get("template") for t in template if t.get("name") == "default"), None)
            if isinstance(template, str):
                return template
        return None

    def file_hashes(self, progress: Progress | None = None) -> dict[str, str]:
        """SHA-256 (hex) by name of every file that a build reads: weights, config, tokenizer, templates, code."""
        sides = [self.folder / name for name in SIDE_FILES if (self.folder / name).is_file()]
        code = sorted(self.folder.glob("*.py")) if self.config.get("auto_map") else []
        hashes = {path.name: sha256_file(path, progress) for path in (*sides, *code)}
        weights = find_weight_files(self.folder)
        if (self.folder / QUANTIZED).is_file():
            weights.append(self.folder / QUANTIZED)
        return hashes | {path.name: _weight_hash(path.resolve(), progress) for path in weights}


def open_folder(
    folder: Path,
    *,
    name: str,
    source: str = "folder",
    revision: str | None = None,
    sha256: str | None = None,
    license: str | None = None,
    card: ModelCard | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Check the folder and open it as a checkpoint. `sha256` of the weights is computed unless given.

    Raises `ZooError` where something is missing, corrupt, pickled, already quantized, or wants its own code to run.
    """
    if not folder.is_dir():
        raise ZooError(f"no folder at {folder}")
    config = read_config(folder / "config.json")
    check_config(config, str(folder), trust_remote_code=trust_remote_code)
    check_code(folder, config)
    files = tuple(path.resolve() for path in find_weight_files(folder))
    _read_tensors(folder, files)
    if not (folder / "tokenizer.json").is_file():
        raise ZooError(
            f"{folder} has no tokenizer.json; make one with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    read_json(folder / "tokenizer.json")
    return Checkpoint(
        name=name,
        folder=folder,
        source=source,
        revision=revision,
        sha256=sha256 or _weights_hash(files, progress),
        license=license or (card.license if card else None),
        config=config,
        card=card,
        files=files,
    )


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dict. Raises `ZooError` where it is missing or no model's configuration."""
    if not path.is_file():
        hint = "; it holds GGUF files: name one as gguf:PATH" if list(path.parent.glob("*.gguf")) else ""
        raise ZooError(f"{path.parent} has no config.json, so it is no model in Hugging Face form{hint}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ZooError(f"{path} names no model_type, so it is no model's configuration")
    return config


def check_config(config: dict[str, Any], where: str, *, trust_remote_code: bool) -> None:
    """Refuse a model that wants its own code to run (unless trusted), and weights quantized in a way not known here."""
    if config.get("auto_map") and not trust_remote_code:
        raise ZooError(
            f"{where} wants to run Python code of its own (auto_map in config.json); read that code, and if you trust "
            "it set trust_remote_code: true in the recipe"
        )
    read_quantization(config, where)


def check_code(folder: Path, config: dict[str, Any]) -> None:
    """The modules that a trusted model's auto_map names must lie in its own folder."""
    for reference in _references(config.get("auto_map")):
        if "--" in reference:
            raise ZooError(f"{folder} wants code of another repository ({reference}), which is never run")
        module = f"{reference.split('.')[0]}.py"
        if not (folder / module).is_file():
            raise ZooError(f"{folder} names {module} in auto_map, but the file is not there")


def _references(auto_map: Any) -> list[str]:
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, or the only one."""
    if (folder / INDEX).is_file():
        names = indexed_files(read_json(folder / INDEX), str(folder / INDEX))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ZooError(f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return [folder / name for name in choose_weights([path.name for path in folder.iterdir()], str(folder))]


def indexed_files(index: dict[str, Any], where: str) -> list[str]:
    """The file names in a safetensors index. Raises `ZooError` where one would lie outside the folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ZooError(f"{where} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ZooError(f"{where} names {name!r}, which is no safetensors file of its folder")
    return names


def choose_weights(names: list[str], where: str) -> list[str]:
    """The only safetensors file among `names`; otherwise a `ZooError` that says why there is none."""
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ZooError(f"{where} has {len(found)} safetensors files and no {INDEX} that says which to use")
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if pickled:
        raise ZooError(
            f"{where} has pickled weights only ({pickled[0]}); loading a pickle can run any code, so plancast reads "
            "safetensors only: use a revision or repository with safetensors, or convert them on a machine you trust"
        )
    if any(name.endswith(".gguf") for name in names):
        raise ZooError(f"{where} has GGUF weights only; fetch one of the files and name it as gguf:PATH")
    raise ZooError(f"{where} has no safetensors weights")


def _read_tensors(folder: Path, files: tuple[Path, ...]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, tensor in read_safetensors_header(file).items():
            if name in tensors:
                raise ZooError(f"{folder}: tensor {name!r} stands in two files")
            tensors[name] = tensor
    if (folder / INDEX).is_file():
        missing = sorted(set(read_json(folder / INDEX)["weight_map"]) - tensors.keys())
        if missing:
            raise ZooError(f"{folder}: {len(missing)} tensors of its index are in no file, first {missing[0]}")
    return tensors


def _weights_hash(files: tuple[Path, ...], progress: Progress | None) -> str:
    """One file's own SHA-256; several files': that of the lines `sha256  name`."""
    hashes = [(_weight_hash(file, progress), file.name) for file in files]
    return hashes[0][0] if len(hashes) == 1 else sha256_text("\n".join(f"{digest}  {name}" for digest, name in hashes))


def _weight_hash(file: Path, progress: Progress | None) -> str:
    """The hub's cache names large files by their SHA-256 (checked as they arrive); others are read."""
    named = file.parent.name == "blobs" and len(file.name) == 64 and set(file.name) <= set("0123456789abcdef")
    return file.name if named else sha256_file(file, progress)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises `ZooError` where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{path} is corrupt: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ZooError(f"{path} is corrupt: not a JSON object")
    return value
