"""Nothing that imports OpenVINO may report that it was used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["runtime.executors.openvino", "builder.backends.openvino", "plugins.native"])
def test_openvino_reports_nothing(module: str, tmp_path: Path) -> None:
    # Its telemetry keeps an identifier in the home folder, and is off where CI is set.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD", "JENKINS_URL")}
    script = (
        f"import {module}, openvino, sys; assert not [m for m in sys.modules if m.startswith('openvino_telemetry.')]"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment | {"HOME": str(tmp_path)}, check=True)
    assert not (tmp_path / "intel").exists()
