"""What a recipe leaves to the machine that builds."""

from __future__ import annotations

import pytest

from builder import machine_choices
from builder.machine_choices import for_this_machine
from builder.recipe import Recipe, recipe_from_dict
from runtime.manifest import HardwareInfo

VNNI, AMX = ["avx2", "avx512_vnni"], ["avx2", "avx512_vnni", "amx_tile", "amx_int8"]


def chosen(monkeypatch: pytest.MonkeyPatch, isa: list[str], **sections: object) -> tuple[int | None, object]:
    """The groups of activations and of weights that a machine with `isa` builds with."""
    monkeypatch.setattr(machine_choices, "this_machine", lambda: HardwareInfo(machine="x86_64", isa=isa))
    recipe = for_this_machine(recipe_from_dict({"name": "a", "model": "m", **sections}))
    return recipe.backend.dynamic_quantization_group_size, recipe.weights.group_size


@pytest.mark.parametrize(
    ("isa", "sections", "groups"),
    [
        (VNNI, {"weights": {"dtype": "int8"}}, (32, 32)),
        (["avx2"], {"weights": {"dtype": "int8"}}, (32, 32)),
        (AMX, {"weights": {"dtype": "int8"}}, (0, None)),
        (AMX, {"weights": {"dtype": "int8", "smooth": 0.5}}, (32, 32)),
        (VNNI, {"weights": {"dtype": "int8", "group_size": "channel"}}, (0, "channel")),
        (VNNI, {"weights": {"dtype": "int8", "group_size": 64}}, (0, 64)),
        (VNNI, {"weights": {"dtype": "int4"}}, (0, None)),
        (VNNI, {"weights": {"dtype": "bf16"}}, (0, None)),
        (VNNI, {"weights": {"dtype": "int8"}, "backend": {"linear": "openvino"}}, (0, None)),
        (VNNI, {"weights": {"dtype": "int8"}, "backend": {"name": "torch"}}, (0, None)),
    ],
)
def test_int8_activations_where_vectors_multiply_int8_weights(
    monkeypatch: pytest.MonkeyPatch, isa: list[str], sections: dict[str, object], groups: tuple[int, object]
) -> None:
    assert chosen(monkeypatch, isa, **sections) == groups


@pytest.mark.parametrize("said", [0, 32, 64])
def test_what_a_recipe_says_stays(monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    backend = {"dynamic_quantization_group_size": said}
    assert chosen(monkeypatch, VNNI, weights={"dtype": "int8"}, backend=backend) == (said, None)


def test_chosen_once() -> None:
    recipe: Recipe = for_this_machine(recipe_from_dict({"name": "a", "model": "m", "weights": {"dtype": "int8"}}))
    assert for_this_machine(recipe) == recipe
