"""TensorRT-RTX from the command line on a machine without a GPU: build, inspect, and one line where it cannot run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_hf import write_tiny_hf

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tensorrt_rtx_bindings", "tensorrt_rtx_libs", "triton")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} (pip install 'plancast[rtx]')")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    write_tiny_hf(folder / "model")
    return folder / "home"


@pytest.fixture(scope="module")
def artifact(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    recipe = folder / "tiny-rtx.yaml"
    recipe.write_text(
        f"model: {home.parent / 'model'}\n"
        "backend: {name: tensorrt_rtx, device: CUDA, compute: f16, compute_capabilities: [SM89, SM120]}\n"
        "weights: {dtype: int4, symmetric: true}\n"
        "kv: int8\n"
        "limits: {max_context_len: 256, max_num_seqs: 8, max_num_batched_tokens: 64}\n"
        "parity: {enabled: false}\n"
    )
    done = plancast("build", str(recipe), "--out", str(folder / "artifact"), home=home)
    assert done.returncode == 0, done.stderr
    return folder / "artifact"


def plancast(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    # Kernels are compiled, not interpreted.
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PLANCAST_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "plancast", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_the_artifact_holds_engines_and_kernels_for_each_gpu(artifact: Path, home: Path) -> None:
    done = plancast("inspect", str(artifact), "--json", home=home)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["backend"]["properties"]["compute_capabilities"] == "SM89 SM120"
    assert facts["derived"]["problem"] is None
    plan = json.loads((artifact / "segments.json").read_text())
    assert len(plan["segments"]) == len(plan["attentions"]) + 1 == 3
    files = {segment["file"] for segment in plan["segments"]}
    for kernel in plan["kernels"].values():
        assert set(kernel["images"]) == {"SM89", "SM120"}
        for image in kernel["images"].values():
            text = (artifact / image["file"]).read_text()
            assert f".entry {image['entry']}(" in text
            assert text.count(".param .") == len(kernel["parameters"])  # what the executor passes, and no more
            files.add(image["file"])
    assert files < set(facts["files"])
    shown = plancast("inspect", str(artifact), home=home).stdout
    assert "segment-001.engine" in shown
    assert "SM120: " in shown


def test_without_a_gpu_one_line_says_what_is_missing(artifact: Path, home: Path) -> None:
    import shutil

    if shutil.which("nvidia-smi"):
        pytest.skip("a GPU may be here")
    done = plancast("generate", str(artifact), "hello", home=home)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {artifact}: built for NVIDIA GPUs (SM89, SM120); ")
    assert "cuda-python" in line or "no NVIDIA driver here" in line


def test_tensorrt_builds_up_to_what_is_missing(artifact: Path, home: Path, tmp_path: Path) -> None:
    """The graph, its plugins' nodes and their kernels are made; then one line says what TensorRT lacks here."""
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    recipe = artifact.parent / "tiny-rtx.yaml"
    settings = ("backend.name=tensorrt", "backend.compute_capabilities=[SM90]")
    options = [part for setting in settings for part in ("--set", setting)]
    done = plancast("build", str(recipe), *options, "--quiet", "--out", str(tmp_path / "no"), home=home)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(
        "error: TensorRT does not load (No module named 'tensorrt'): pip install 'plancast[tensorrt]'"
    )
    assert not (tmp_path / "no").exists()


def test_parity_without_a_gpu_is_refused_before_the_build(artifact: Path, home: Path, tmp_path: Path) -> None:
    recipe = artifact.parent / "tiny-rtx.yaml"
    done = plancast("build", str(recipe), "--set", "parity.enabled=true", "--out", str(tmp_path / "no"), home=home)
    assert done.returncode == 2
    assert "parity.enabled=false" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "no").exists()


def test_weights_are_left_out_and_put_back(artifact: Path, home: Path, tmp_path: Path) -> None:
    """Without a GPU: the engines become what they were, to the last byte, or the artifact stays as it is."""
    recipe = artifact.parent / "tiny-rtx.yaml"
    out = tmp_path / "stripped"
    done = plancast("build", str(recipe), "--strip-weights", "--out", str(out), home=home)
    assert done.returncode == 0, done.stderr
    cut = json.loads((out / "stripped.json").read_text())["files"]
    assert set(cut) == {path.name for path in out.glob("*.engine")}
    sizes = {name: (out / name).stat().st_size for name in cut}
    gone = {name: sum(hole[1] for hole in file["holes"]) for name, file in cut.items()}
    assert sizes == {name: file["bytes"] - gone[name] for name, file in cut.items()}
    weights = json.loads((out / "manifest.json").read_text())["weights_bytes"]
    # All but the halves of merged scales that are too short to look for.
    assert sum(gone.values()) > 0.9 * sum(weights.values())
    done = plancast("generate", str(out), "hello", home=home)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"error: {out}: its engines were built without weights; put them in: plancast refit {out}"
    ]
    before = (out / "manifest.json").read_bytes()
    other = plancast("refit", str(out), "--model", str(tmp_path / "nowhere"), home=home)
    assert other.returncode == 2
    assert (out / "manifest.json").read_bytes() == before
    done = plancast("refit", str(out), "--quiet", home=home)
    assert done.returncode == 0, done.stderr
    assert not (out / "stripped.json").exists()
    for name, file in cut.items():
        data = (out / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
    assert plancast("verify", str(out), home=home).returncode == 0
    again = plancast("refit", str(out), home=home)
    assert again.stderr.strip().splitlines()[-1] == f"error: {out}: its engine has its weights already"
