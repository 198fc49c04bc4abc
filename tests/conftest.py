"""Fixtures that several rooms share: the real model's engines, built through the real build and cached on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, by whichever test does it first

import pytest
from hypothesis import settings

# A submission is judged by the same examples each time; at a desk each run looks for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

ROOT = Path(__file__).resolve().parent.parent


def _build(recipe: str, folder: Path) -> Path:
    """Built by a process of its own, as a user's are: the memory in its manifest is then the build's alone."""
    from builder.recipe import load_recipe
    from runtime.errors import ZooError
    from zoo.models import pull

    try:
        pull(load_recipe(recipe).model)
    except ZooError as error:
        pytest.skip(f"the real model is not to be had here: {error}")
    command = [sys.executable, "-m", "plancast", "build", recipe, "--out", str(folder / recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder / recipe


@pytest.fixture(scope="session")
def smollm2_f32_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exact engine of SmolLM2-135M-Instruct: f32 weights, compute and KV."""
    return _build("smollm2-135m-cpu-f32", tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def smollm2_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's engine of SmolLM2-135M-Instruct."""
    return _build("smollm2-135m-cpu", tmp_path_factory.mktemp("engines"))
