"""What a recipe leaves to the machine that builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from runtime.hardware import this_machine

if TYPE_CHECKING:
    from builder.recipe import Recipe

# Our kernels' groups, of weights and of activations.
_GROUP = 32


def for_this_machine(recipe: Recipe) -> Recipe:
    """`recipe` with every choice made that it leaves open, as this machine's measurements say.

    `backend.dynamic_quantization_group_size` null: int8 weights and activations in groups of 32, which by vectors are
    the fastest from 8 rows on and no less exact than a scale a channel with int16 activations. AMX multiplies those
    faster. docs/cpu-kernels.md has the measurements.
    """
    backend, weights = recipe.backend, recipe.weights
    if backend.dynamic_quantization_group_size is not None:
        return recipe
    pays = "amx_int8" not in this_machine().isa or weights.smooth is not None  # which is for int8 activations
    ours = backend.name == "openvino" and backend.linear == "native"
    grouped = ours and weights.dtype == "int8" and weights.group_size in (None, _GROUP) and pays
    return msgspec.structs.replace(
        recipe,
        backend=msgspec.structs.replace(backend, dynamic_quantization_group_size=_GROUP if grouped else 0),
        weights=msgspec.structs.replace(weights, group_size=_GROUP) if grouped else weights,
    )
