"""The wheel that `make wheel` makes: it carries the compiled C++ operators, and generates with them once installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_build import plancast_home, tiny_recipe, tiny_workshop

ROOT = Path(__file__).resolve().parents[2]
_GENERATE = """
import sys
import plancast
from plugins.native import find_native
library = find_native()
assert library is not None and library.is_relative_to(sys.argv[2]), library
with plancast.LLM(sys.argv[1]) as llm:
    result = llm.generate([[1, 2, 3]], plancast.SamplingParams(temperature=0, max_tokens=5))[0]
    print(len(result.outputs[0].token_ids))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_carries_the_operators_and_generates(tmp_path: Path) -> None:
    from plugins.native import NativeBuildError, build_native

    try:
        build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    source = tmp_path / "source"
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in tracked:
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run(sys.executable, "-m", "plugins.native", "--bundle", cwd=source, PYTHONPATH=str(source))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ".", cwd=source)
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.startswith("plancast-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sum(name.endswith("libplancast_native.so") for name in names) == 1
    assert not any(name.startswith("tests") for name in names)

    site, home, empty = tmp_path / "site", tmp_path / "home", tmp_path / "empty"
    empty.mkdir()
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=empty)
    artifact = tmp_path / "artifact"
    with plancast_home(tmp_path / "builds"):
        from builder.build import build

        build(tiny_recipe(tiny_workshop() / "model", weights={"dtype": "int8"}), artifact)
    command = (sys.executable, "-P", "-c", _GENERATE, artifact, site)
    assert run(*command, cwd=empty, PYTHONPATH=str(site), PLANCAST_HOME=str(home)).strip().endswith("5")
