"""The stage of a build that adds a trained head's engine to its target's artifact."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from builder.drafts.head_file import find_head, load_head
from runtime.artifact import installed_plugins
from runtime.manifest import DraftHeadInfo

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.checkpoint import Checkpoint
    from zoo.progress import Progress

VOCABULARY = "head.vocabulary.json"


def build_head(recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress) -> DraftHeadInfo:
    """Build the engine of the recipe's `draft_head` into `folder`, as head.xml, head.bin and head.plan.

    Its weights are int8; compute, KV format and limits are the recipe's.

    Raises:
        PlancastError: no such head, one for another model, or the backend does not compile it.
    """
    from builder import stages
    from builder.layer_graph import extract_layer, operator_counts
    from builder.recipe import recipe_from_dict, recipe_to_dict
    from builder.trace import trace_head

    assert recipe.draft_head is not None
    found = find_head(recipe.draft_head)
    head = load_head(found, checkpoint, trust_remote_code=recipe.trust_remote_code)
    value = recipe_to_dict(recipe)
    value |= {
        "draft_head": None,
        "speculation": {},
        "weights": {"dtype": "int8"},
        # Its few rows wait for memory whatever they are rounded to.
        "backend": value["backend"] | {"dynamic_quantization_group_size": 0},
        "kv": value["kv"] | {"skip_layers": []},
    }
    own = recipe_from_dict(value)
    model = trace_head(head)
    values = tuple(model.graph.initializers.values())
    traced = stages.TracedGraph(model, operator_counts(model), extract_layer(model), values)
    quantized = stages.quantize(stages.fuse(traced, own, progress), own, progress)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".head-") as scratch:
        engine = stages.compile_engine(quantized, own, Path(scratch), progress)
        for file in Path(scratch).iterdir():
            os.replace(file, folder / _renamed(file.name))
    (folder / VOCABULARY).write_bytes(msgspec.json.encode({"target_ids": found.facts.target_ids}))
    backend = msgspec.structs.replace(
        engine.backend,
        engine=_renamed(engine.backend.engine),
        plan=_renamed(engine.backend.plan) if engine.backend.plan else None,
        blob=_renamed(engine.backend.blob) if engine.backend.blob else None,
    )
    return DraftHeadInfo(
        name=found.path.name,
        backend=backend,
        kv=engine.kv,
        plugins={name: version for name, version in installed_plugins().items() if name in engine.operators}
        | engine.backend.plugins,
        vocabulary=VOCABULARY,
        accepted_by_position=found.facts.accepted_by_position,
    )


def _renamed(name: str) -> str:
    """engine.xml -> head.xml: an IR finds its weights beside it under its own stem."""
    return "head" + Path(name).suffix
