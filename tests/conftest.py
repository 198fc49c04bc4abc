"""Fixtures that several rooms share: the real model's engines, built through the real build and cached on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A submission is judged by the same examples each time; at a desk each run looks for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

ROOT = Path(__file__).resolve().parent.parent


def _build(recipe: str, folder: Path) -> Path:
    from builder.build import build
    from builder.recipe import load_recipe
    from runtime.errors import ZooError

    try:
        return build(load_recipe(recipe), folder / recipe)
    except ZooError as error:
        pytest.skip(f"the real model is not to be had here: {error}")


@pytest.fixture(scope="session")
def smollm2_f32_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exact engine of SmolLM2-135M-Instruct: f32 weights, compute and KV."""
    return _build("smollm2-135m-cpu-f32", tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def smollm2_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's engine of SmolLM2-135M-Instruct."""
    return _build("smollm2-135m-cpu", tmp_path_factory.mktemp("engines"))
