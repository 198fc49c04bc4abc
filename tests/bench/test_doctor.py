"""`plancast doctor` and `plancast bench kernels`: what they say is what is there."""

from __future__ import annotations

import importlib.metadata
import json
import os

import pytest
from typer.testing import CliRunner

import bench.doctor as doctor
import bench.kernels_bench as kernels_bench
from bench.machine import Limits
from plancast import _make_app
from plugins.native import NativeBuildError, build_native


@pytest.fixture(scope="module")
def _native():
    try:
        build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")


@pytest.fixture
def quick(monkeypatch):
    """Measuring is not what is tested."""
    monkeypatch.setattr(doctor, "measure_limits", lambda native, threads, rounds: Limits(1e10, 4e11, None))


@pytest.mark.usefixtures("_native", "quick")
def test_the_report_names_what_is_there(tmp_path):
    result = CliRunner().invoke(_make_app(), ["doctor", "--json", str(tmp_path / "d.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "d.json").read_text())
    assert report["machine"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert report["backends"]["openvino"] == {"builds": True, "runs": True, "why": ""}
    core = {package["name"]: package for package in report["packages"]["core"]}
    assert core["openvino"]["version"] == importlib.metadata.version("openvino")
    assert all(package["state"] == "ok" for package in core.values())
    assert "torch" in {package["name"] for package in report["packages"]["build"]}
    fast = bool({"avx512_vnni", "avx_vnni"} & set(report["machine"]["isa"]))
    assert [entry["what"] for entry in report["missing"]] == ([] if fast else ["VNNI in this processor"])
    assert "reads 10.0 GB/s" in result.output
    assert ("Nothing is missing." in result.output) == fast
    assert "driver: " in result.output
    if "cuda-python, which is not" in result.output:
        assert "plancast[rtx]" in result.output


@pytest.mark.usefixtures("quick")
def test_what_is_missing_is_named_with_its_cost(monkeypatch):
    monkeypatch.setattr(doctor, "find_native", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    real = doctor.metadata.version
    lacking = {"torch": None, "openvino": "2025.1.0"}

    def version(name):
        if name in lacking:
            if lacking[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return lacking[name]
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    report = doctor.examine()
    states = {package["name"]: package["state"] for extra in report["packages"].values() for package in extra}
    assert states["torch"] == "is not installed"
    assert states["openvino"] == "is 2025.1.0, not ==2026.4.1"
    assert report["backends"]["openvino"]["runs"] is False
    assert report["native"] == {"library": None, "isa": None, "compiler": None, "cmake": report["native"]["cmake"]}
    whats = {entry["what"]: entry for entry in report["missing"]}
    assert "install CMake and a C++17 compiler" in whats["the library of C++ operators"]["mend"]
    assert whats["what building needs"]["mend"] == "pip install 'plancast[build]'"
    assert all(entry["cost"] for entry in report["missing"])
    result = CliRunner().invoke(_make_app(), ["doctor"])
    assert result.exit_code == 1
    assert "not built" in result.output


@pytest.mark.usefixtures("_native")
def test_kernels_are_measured_against_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels_bench, "measure_limits", lambda native, threads: Limits(1e10, 4e11, 2e11))
    monkeypatch.setattr(kernels_bench, "SHAPES", ((64, 64),))
    monkeypatch.setattr(kernels_bench, "COPIES_BYTES", 1)
    command = ["bench", "kernels", "--only", "linear", "--rows", "2", "--threads", "1", "--seconds", "0.01"]
    result = CliRunner().invoke(_make_app(), [*command, "--json", str(tmp_path / "k.json")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "k.json").read_text())["figures"]
    assert [figure["case"] for figure in figures] == [f"{name}, 64 x 64" for name in kernels_bench.FORMATS]
    for figure in figures:
        assert figure["ops"] == 2 * 2 * 64 * 64
        assert figure["gb_per_s"] == pytest.approx(figure["bytes"] / figure["seconds"] / 1e9)
        assert figure["of_read"] == pytest.approx(figure["gb_per_s"] / 10)
        assert figure["of_peak"] == pytest.approx(figure["gops"] / (200 if figure["peak"] == "bf16" else 400))
    unknown = CliRunner().invoke(_make_app(), ["bench", "kernels", "--only", "nothing"])
    assert "there is no kind of kernel 'nothing'; there are: linear" in str(unknown.exception)
