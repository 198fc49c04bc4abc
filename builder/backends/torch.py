"""The torch backend: the graph as it is, run operator by operator. Slow on a CPU, and the yardstick for the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.backends.kv_layout import layout_of
from plugins.paged_attention.kv_formats import KvFormat
from runtime.errors import BuildError
from runtime.kv_layout import KvLayout
from runtime.manifest import BackendInfo

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.recipe import Recipe
    from zoo.progress import Progress

ENGINE = "engine.onnx"
WEIGHTS = "engine.onnx.data"  # what ENGINE refers to, by its name alone


def compile_engine(model: ir.Model, recipe: Recipe, folder: Path, progress: Progress | None = None) -> BackendInfo:
    """Write the graph of `model` into `folder`, its weights beside it.

    Raises:
        BuildError: the graph has an operator that the engine does not know. Nothing is left in `folder` then, nor by
            any other exception.
    """
    import onnx_ir as ir
    import torch

    from plugins.torch_engine.engine import unsupported

    unknown = unsupported(model)
    if unknown:
        raise BuildError(
            f"the graph has {', '.join(unknown)}, which the torch backend does not compute; build for openvino"
        )
    try:
        ir.save(model, folder / ENGINE, external_data=WEIGHTS)
    except BaseException:
        for name in (ENGINE, WEIGHTS):
            (folder / name).unlink(missing_ok=True)
        raise
    return BackendInfo(
        name="torch",
        version=str(torch.__version__),  # a class of its own
        device=recipe.backend.device,
        properties={
            "compute": recipe.backend.compute,
            "kernels": "reference" if recipe.backend.device == "CPU" else "triton",
        },
        engine=ENGINE,
    )


def kv_layout(model: ir.Model, recipe: Recipe) -> KvLayout:
    """The KV cache that the engine of `model` has, layer by layer: pages of `kv_formats.py`."""
    return layout_of(model, recipe, KvFormat.scale_bytes)
