"""`plancast build` as people run it: bad input is one line, an interrupt leaves nothing, a second build is quick."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_build import SECTIONS, tiny_workshop
from tiny_hf import CONTEXT, write_tiny_hf

from plugins.native import native_folder
from runtime.artifact import Artifact

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def workshop() -> Path:
    return tiny_workshop()


def environment(home: Path) -> dict[str, str]:
    """PLANCAST_HOME at `home`, which shares the built C++ operators; the hub is never asked."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "native").exists():
        native_folder().mkdir(parents=True, exist_ok=True)
        (home / "native").symlink_to(native_folder(), target_is_directory=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PLANCAST_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "COLUMNS": "200"}


def plancast(*arguments: str, home: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plancast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(home), timeout=300)


def recipe_file(folder: Path, model: Path | str, **sections: object) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), **SECTIONS, **sections}))
    return path


def left_in(folder: Path) -> list[str]:
    """Files under `folder` that a build may have left, apart from locks and remembered hashes."""
    kept = ("locks", "hashes", "native", "pulled")
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_dir() and path.suffix != ".lock" and path.relative_to(folder).parts[0] not in kept
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused command ends with."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.rstrip().endswith(lines[0])
    return lines[0]


def test_build_then_build_again_within_two_seconds(workshop: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, workshop / "model")
    home = tmp_path / "home"
    done = plancast("build", str(recipe), "--json", home=home, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["cached"] is False
    assert facts["path"] == "artifacts/tiny"
    assert facts["parity"]["greedy_matching_prompts"] == 4
    for stage in ("pull", "trace", "compile", "parity", "write"):
        assert any(line.startswith(stage) for line in done.stderr.splitlines())
    Artifact.open(tmp_path / "artifacts" / "tiny", verify="full")
    assert plancast("verify", "artifacts/tiny", home=home, cwd=tmp_path).returncode == 0
    assert "LlamaForCausalLM" in plancast("inspect", "artifacts/tiny", home=home, cwd=tmp_path).stdout

    code = "import sys, plancast\ntry: plancast.main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "build", str(recipe), "--out", "again"]
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(home))
    assert again.returncode == 0, again.stderr
    assert "from the build cache" in again.stdout
    # What makes it quick: nothing heavy is imported. (The time itself is bench's affair, on a machine at rest.)
    assert not {"torch", "transformers", "onnx", "onnx_ir", "openvino"} & set(again.stderr.split())


def test_dry_run_prints_the_plan_and_writes_nothing(workshop: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, workshop / "model")
    done = plancast("build", str(recipe), "--dry-run", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("tiny -> artifacts/tiny", "trace", "compile", "parity", "disk:", "GiB"):
        assert part in done.stdout
    facts = json.loads(
        plancast("build", str(recipe), "--dry-run", "--json", home=tmp_path / "home", cwd=tmp_path).stdout
    )
    assert facts["cached"] is False
    assert facts["memory"]["compile"] > 0
    assert not (tmp_path / "artifacts").exists()
    assert left_in(tmp_path / "home") == []


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def bad_model(folder: Path, kind: str) -> Path | str:
    """A model of which `kind` is wrong, somewhere in `folder`."""
    if kind == "missing card":
        return "smollm3-135m-instruct"
    if kind == "missing folder":
        return folder / "nothing"
    if kind == "corrupt gguf":
        (folder / "model.gguf").write_bytes(b"GGUF" + bytes(range(200)))
        return f"gguf:{folder / 'model.gguf'}"
    if kind == "truncated gguf":
        from tiny_hf import write_tiny_gguf

        write_tiny_gguf(folder / "model.gguf")
        cut(folder / "model.gguf")
        return f"gguf:{folder / 'model.gguf'}"
    model = write_tiny_hf(folder / "model")
    if kind == "truncated safetensors":
        cut(model / "model.safetensors")
    elif kind == "corrupt safetensors":
        (model / "model.safetensors").write_bytes(b"\xff" * 1000)
    elif kind == "unsupported family":
        (model / "config.json").write_text(
            json.dumps({**SIZES, "model_type": "mamba", "architectures": ["MambaForCausalLM"]})
        )
    elif kind == "no such family":
        (model / "config.json").write_text(json.dumps({**SIZES, "model_type": "perpetuum"}))
    elif kind == "missing weight":
        from safetensors.numpy import load_file, save_file

        weights = load_file(model / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, model / "model.safetensors")
    elif kind == "pickled":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    elif kind == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif kind == "broken tokenizer":
        (model / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    else:
        raise AssertionError(kind)
    return model


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing card", "smollm3-135m-instruct"),
        ("missing folder", "nothing"),
        ("corrupt gguf", "model.gguf"),
        ("truncated gguf", "model.gguf"),
        ("truncated safetensors", "model.safetensors"),
        ("corrupt safetensors", "model.safetensors"),
        ("unsupported family", "mamba"),
        ("no such family", "perpetuum"),
        ("missing weight", "up_proj"),
        ("pickled", "pickle"),
        ("no tokenizer", "tokenizer.json"),
        ("broken tokenizer", "tokenizer.json"),
    ],
)
def test_bad_models_are_one_clear_line_and_leave_nothing(tmp_path: Path, kind: str, told: str) -> None:
    recipe = recipe_file(tmp_path, bad_model(tmp_path, kind))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    line = refused(plancast("build", str(recipe), "--out", "out", home=tmp_path / "home", cwd=tmp_path))
    assert told in line
    assert not (tmp_path / "out").exists()
    assert left_in(tmp_path / "home") == []
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}.items()


def test_too_much_context_no_disk_and_bad_recipes_are_refused(workshop: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    recipe = str(recipe_file(tmp_path, workshop / "model"))

    def build(*arguments: str) -> str:
        return refused(plancast("build", *arguments, home=home, cwd=tmp_path))

    assert f"{CONTEXT}" in build(recipe, "--set", "limits.max_context_len=4096")
    assert "quality.max_kl" in build(recipe, "--set", "parity.enabled=false", "--set", "quality.max_kl=0.1")
    assert "nonsense" in build("nonsense")
    (tmp_path / "full").write_text("a file, so no folder can be made in it")
    assert "full" in build(recipe, "--out", str(tmp_path / "full" / "artifact"))
    assert left_in(home) == []


def test_a_broken_bound_exits_with_the_figure(workshop: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, workshop / "model", quality={"max_kl": 1e-30})
    line = refused(plancast("build", str(recipe), home=workshop / "home", cwd=tmp_path))
    assert "over quality.max_kl 1e-30" in line
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_case_23_no_disk_is_one_line(workshop: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        recipe = recipe_file(tmp_path, workshop / "model")
        line = refused(plancast("build", str(recipe), "--out", "out", home=disk / "home", cwd=tmp_path))
        assert "of disk in" in line
        assert "are free" in line
        assert left_in(disk / "home") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(("moment", "number"), [("trace", signal.SIGTERM), ("parity", signal.SIGINT)])
def test_a_signal_leaves_nothing_behind(workshop: Path, tmp_path: Path, moment: str, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM, while PyTorch traces and while the original model runs in its own process."""
    recipe = recipe_file(tmp_path, workshop / "model")
    previous = {"trace": "pull", "parity": "compile"}[moment]
    process = subprocess.Popen(
        [sys.executable, "-m", "plancast", "build", str(recipe), "--out", "out", "--force"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(tmp_path / "home"),
    )  # fmt: skip
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith(previous):
            break
    time.sleep(1.5)
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number), seen + rest
    assert "Traceback" not in seen + rest
    assert not (tmp_path / "out").exists()
    assert left_in(tmp_path / "home") == []
    assert reference_processes(tmp_path) == []


def test_a_killed_build_leaves_no_helper_and_nothing_that_loads(workshop: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, workshop / "model")
    home = tmp_path / "home"
    process = subprocess.Popen(
        [sys.executable, "-m", "plancast", "build", str(recipe), "--out", "out"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(home),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("compile"):
            break
    time.sleep(1.5)
    process.kill()
    process.wait()
    process.stderr.close()
    deadline = time.monotonic() + 10
    while reference_processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert reference_processes(tmp_path) == []
    assert not (tmp_path / "out").exists()
    assert not any(path.name == "manifest.json" for path in home.rglob("manifest.json"))
    done = plancast("build", str(recipe), "--out", "out", home=home, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hidden = [path for path in (home / "builds").iterdir() if path.name.startswith(".") and path.suffix != ".lock"]
    assert hidden == []


def reference_processes(folder: Path) -> list[str]:
    """Command lines of the comparison's helpers that work for a build in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "parity_reference" in command and str(folder) in command:
            found.append(command)
    return found


def test_json_errors_and_usage(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert plancast("build", home=home, cwd=tmp_path).returncode == 2
    shutil.rmtree(home)
    assert "no such artifact" in refused(plancast("verify", "artifacts/none", home=home, cwd=tmp_path))
    assert "no such artifact" in refused(plancast("inspect", "artifacts/none", home=home, cwd=tmp_path))
