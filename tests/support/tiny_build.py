"""A tiny random Llama built end to end, once a session: a real artifact, in a second or two of compute."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_hf import CONTEXT, write_tiny_hf

from builder.recipe import Recipe, recipe_from_dict, recipe_to_dict

SECTIONS: dict[str, Any] = {
    "limits": {"max_context_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    "parity": {"prompts": 4, "new_tokens": 8},
}


def tiny_recipe(model: Path | str, name: str = "tiny", **sections: Any) -> Recipe:
    """A recipe for a folder that `write_tiny_hf` wrote, with `sections` laid over it."""
    value = recipe_to_dict(Recipe(name=name, model=str(model)))
    for layer in (SECTIONS, sections):
        for key, section in layer.items():
            value[key] = {**value[key], **section} if isinstance(section, dict) else section
    return recipe_from_dict(value)


@contextmanager
def plancast_home(folder: Path) -> Iterator[Path]:
    """Let everything that plancast keeps lie in `folder`, the C++ operators aside: those take long to build."""
    from plugins.native import native_folder

    native = native_folder()
    before = os.environ.get("PLANCAST_HOME")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "native").exists():
        native.mkdir(parents=True, exist_ok=True)
        (folder / "native").symlink_to(native, target_is_directory=True)
    os.environ["PLANCAST_HOME"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["PLANCAST_HOME"]
        else:
            os.environ["PLANCAST_HOME"] = before


def tiny_head(model: Path, folder: Path) -> Path:
    """A head for the model in `model` as it is before any training, written into `folder`."""
    import msgspec
    import torch
    from transformers import AutoModelForCausalLM

    from builder.drafts.head import make_head
    from builder.drafts.head_file import HeadFacts, save_head

    target_ids = list(range(0, 512, 2)) + list(range(1, 512, 4))
    head = make_head(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), sorted(target_ids))
    facts = HeadFacts(target="tiny", shape=msgspec.structs.asdict(head.config), target_ids=sorted(target_ids))
    save_head(head, facts, folder, "A head.\n")
    return folder


@functools.cache
def tiny_workshop() -> Path:
    """A folder with `model` (the tiny Llama), `home` (PLANCAST_HOME) and `artifact` (built); gone when Python ends."""
    from builder.build import build

    folder = Path(tempfile.mkdtemp(prefix="plancast-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_hf(folder / "model")
    (folder / "model" / "LICENSE.txt").write_text("Do what you like.\n")
    with plancast_home(folder / "home"):
        build(tiny_recipe(folder / "model"), folder / "artifact")
    return folder
