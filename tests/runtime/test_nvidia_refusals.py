"""NVIDIA artifacts that do not run here: one line each, with what was found and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import tiny_manifest

from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.errors import ArtifactError
from runtime.executors import open_executor
from runtime.executors.segments import cuda
from runtime.executors.segments.engines import LIBRARIES
from runtime.manifest import BackendInfo


def artifact(folder: Path, **backend: Any) -> Artifact:
    """An artifact that says it was built so; its engine is never looked at."""
    info = BackendInfo(**{"engine": "engine.xml", "device": "CUDA", "version": "1.7.1.116"} | backend)
    with ArtifactWriter(folder) as writer:
        (writer.path / "engine.xml").write_text("")
        (writer.path / "tokenizer.json").write_text("{}")
        manifest = writer.commit(tiny_manifest(backend=info))
    return Artifact(folder, manifest)


def said(call: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tensorrt_rtx", "tensorrt"])
def test_engines_without_weights(tmp_path: Path, name: str) -> None:
    built = artifact(tmp_path / "a", name=name, properties={"weights": "stripped"})
    expected = f"{built.path}: its engines were built without weights; put them in: plancast refit {built.path}"
    assert said(lambda: open_executor(built)) == expected


@pytest.mark.parametrize(("name", "title"), [("tensorrt", "TensorRT"), ("tensorrt_rtx", "TensorRT-RTX")])
def test_no_driver_or_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, title: str) -> None:
    """One line: for what it was built, what is missing, and the extra that brings it."""
    built = artifact(tmp_path / "a", name=name, properties={"weights": "inside", "compute_capabilities": "SM89 SM90"})
    begin, extra = f"{built.path}: built for NVIDIA GPUs (SM89, SM90); ", name.removeprefix("tensorrt_")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert said(lambda: open_executor(built)) == (
        f"{begin}NVIDIA engines run by cuda-python, which is not installed: pip install 'plancast[{extra}]'"
    )
    monkeypatch.setattr(cuda, "load_driver", lambda extra: None)
    monkeypatch.setitem(sys.modules, LIBRARIES[name].modules[0], None)
    line = said(lambda: open_executor(built))
    assert line.startswith(f"{begin}{title} does not load (")
    assert f"pip install 'plancast[{extra}]'" in line


def test_another_version_of_the_library(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs TensorRT-RTX (pip install 'plancast[rtx]')")
    here = importlib.metadata.version("tensorrt-rtx-cu13-bindings")
    folder = artifact(tmp_path / "a", name="tensorrt_rtx", version="1.2.0.54").path
    line = said(lambda: Artifact.open(folder))
    assert line.startswith(f"tiny: built with tensorrt_rtx 1.2.0.54, and {here} is installed here; rebuild it")
    assert line.endswith("pip install tensorrt-rtx-cu13-bindings==1.2.0.54)")


def test_no_library_at_all(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    folder = artifact(tmp_path / "a", name="tensorrt", version="11.4.0.106").path
    line = said(lambda: Artifact.open(folder))
    assert line == "tiny: built with tensorrt 11.4.0.106, which is not installed here; pip install tensorrt==11.4.0.106"
