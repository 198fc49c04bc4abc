"""Opening an artifact: what is whole loads, and everything else is refused with what to do about it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifact import FILES, tiny_manifest, write_tiny_artifact

from runtime import artifact as artifact_module
from runtime.artifact import Artifact, installed_plugins, unlisted_files
from runtime.errors import ArtifactError
from runtime.hardware import this_machine
from runtime.manifest import FORMAT_VERSION, BackendInfo, FileInfo, HardwareInfo, decode_manifest, encode_manifest

REBUILD = r"plancast build tiny --force"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("artifact") / "tiny")


@pytest.fixture
def tiny(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "tiny")


def test_whole_artifact_opens_and_names_its_files(tiny: Path) -> None:
    for verify in ("quick", "full"):
        artifact = Artifact.open(tiny, verify=verify)
        assert artifact.path == tiny
        assert artifact.notes == ()
    assert set(artifact.manifest.files) == set(FILES)
    assert artifact.file("engine.bin").read_bytes() == FILES["engine.bin"]
    assert artifact.blob == tiny / "engine.blob"
    assert artifact.optional_file("chat_template.jinja") is None
    with pytest.raises(ArtifactError, match=r"holds no chat_template.jinja; .*" + REBUILD):
        artifact.file("chat_template.jinja")


def test_opens_through_a_linked_folder(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny)
    assert Artifact.open(tmp_path / "link").path == tiny


def test_manifest_round_trips_and_its_digest_is_not_the_content_s() -> None:
    manifest = tiny_manifest(recipe={"name": "tiny", "note": "0" * 64})
    data = encode_manifest(manifest)
    back = decode_manifest(data)
    assert back.digest != "0" * 64
    assert msgspec.structs.replace(back, digest=manifest.digest) == manifest
    assert encode_manifest(back) == data


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_changed_byte_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted([*FILES, "manifest.json"])))
    path = pristine / name
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != before[at]))
    try:
        path.write_bytes(before[:at] + bytes([value]) + before[at + 1 :])
        with pytest.raises(ArtifactError, match=r"plancast build (tiny|RECIPE|\S+) --force"):
            Artifact.open(pristine, verify="full")
    finally:
        path.write_bytes(before)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_truncation_is_found_at_once(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted([*FILES, "manifest.json"])))
    path = pristine / name
    before = path.read_bytes()
    try:
        path.write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
        with pytest.raises(ArtifactError, match="plancast build"):
            Artifact.open(pristine, verify="quick")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", sorted(FILES))
def test_missing_file_is_named(tiny: Path, name: str) -> None:
    (tiny / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing.*{REBUILD}"):
        Artifact.open(tiny)


def test_no_artifact_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no such artifact; build one: plancast build RECIPE --out"):
        Artifact.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"holds no manifest.json.*plancast build"):
        Artifact.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="not a folder"):
        Artifact.open(tmp_path / "file")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"name": "tiny"}', b"[" * 100_000])
def test_manifest_that_is_none(tiny: Path, data: bytes) -> None:
    (tiny / "manifest.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"manifest.json: .*--force"):
        Artifact.open(tiny)


def test_another_format_version_is_told_before_anything_else(tiny: Path) -> None:
    (tiny / "manifest.json").write_text(json.dumps({"format_version": 99, "name": "tiny", "from": "the future"}))
    with pytest.raises(ArtifactError, match=rf"format version 99, .*reads version {FORMAT_VERSION}; .*{REBUILD}"):
        Artifact.open(tiny)


def test_manifest_of_another_shape_names_the_field() -> None:
    text = encode_manifest(tiny_manifest()).replace(b'"max_num_seqs": 4', b'"max_num_seqs": "four"')
    import hashlib

    digest = json.loads(text)["digest"].encode()
    text = text.replace(digest, hashlib.sha256(text.replace(digest, b"0" * 64)).hexdigest().encode())
    with pytest.raises(ArtifactError, match=r"Expected `int`, got `str` - at `\$.limits.max_num_seqs`"):
        decode_manifest(text)


def test_case_22_another_backend_version_names_both_and_the_command(tmp_path: Path) -> None:
    backend = BackendInfo(name="openvino", version="2025.1.0-177-releases", engine="engine.xml")
    folder = write_tiny_artifact(tmp_path / "tiny", backend=backend)
    import importlib.metadata

    installed = importlib.metadata.version("openvino")
    with pytest.raises(ArtifactError, match=rf"openvino 2025.1.0, and {installed} is installed.*{REBUILD}"):
        Artifact.open(folder)


def test_long_and_short_form_of_a_backend_version_are_one(tmp_path: Path) -> None:
    import importlib.metadata

    version = importlib.metadata.version("openvino") + "-22982-e213a147257-releases/2026/4"
    backend = BackendInfo(name="openvino", version=version, engine="engine.xml")
    Artifact.open(write_tiny_artifact(tmp_path / "tiny", backend=backend))


def test_backend_that_is_not_installed_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(artifact_module.BACKEND_DISTRIBUTIONS, "openvino", "no-such-distribution")
    folder = write_tiny_artifact(tmp_path / "tiny")
    with pytest.raises(ArtifactError, match=r"not installed here; pip install no-such-distribution=="):
        Artifact.open(folder)
    backend = BackendInfo(name="abacus", version="1", engine="engine.xml")
    folder = write_tiny_artifact(tmp_path / "other", backend=backend)
    with pytest.raises(ArtifactError, match=r"'abacus' is unknown.*openvino.*"):
        Artifact.open(folder)


def test_another_plugin_version(tmp_path: Path) -> None:
    assert installed_plugins()["PagedAttention"] >= 1
    folder = write_tiny_artifact(tmp_path / "tiny", plugins={"PagedAttention": 99})
    with pytest.raises(ArtifactError, match=r"PagedAttention v99, and this plancast has v\d+; .*" + REBUILD):
        Artifact.open(folder)
    folder = write_tiny_artifact(tmp_path / "other", plugins={"Perpetuum": 1})
    with pytest.raises(ArtifactError, match=r"Perpetuum v1, unknown here"):
        Artifact.open(folder)


def test_another_machine_is_refused_and_another_cpu_falls_back_to_the_portable_form(tmp_path: Path) -> None:
    folder = write_tiny_artifact(tmp_path / "tiny", hardware=HardwareInfo(machine="vax"))
    with pytest.raises(ArtifactError, match=rf"built for vax, and this machine is {this_machine().machine}"):
        Artifact.open(folder)
    hardware = HardwareInfo(machine=this_machine().machine, isa=["avx9000"])
    artifact = Artifact.open(write_tiny_artifact(tmp_path / "other", hardware=hardware))
    assert artifact.blob is None
    assert "avx9000" in artifact.notes[0]
    assert "engine.xml is compiled at load" in artifact.notes[0]


def test_links_are_refused(tiny: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    (tiny / "engine.bin").rename(outside)
    (tiny / "engine.bin").symlink_to(outside)
    with pytest.raises(ArtifactError, match=r"engine.bin is not a regular file"):
        Artifact.open(tiny)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "sub/file", "..", "", "manifest.json", "a\0b"])
def test_names_that_lead_outside_are_refused(tiny: Path, name: str) -> None:
    manifest = decode_manifest((tiny / "manifest.json").read_bytes())
    files = {**manifest.files, name: FileInfo(sha256="0" * 64, bytes=1)}
    (tiny / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(ArtifactError, match="no plain file name"):
        Artifact.open(tiny)


def test_unlisted_files_do_not_stop_a_load_but_are_told(tiny: Path) -> None:
    (tiny / "notes.md").write_text("mine")
    (tiny / ".hidden").write_text("")
    manifest = Artifact.open(tiny, verify="full").manifest
    assert unlisted_files(tiny, manifest) == ["notes.md"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_manifest(tiny: Path) -> None:
    (tiny / "manifest.json").chmod(0)
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.open(tiny)
