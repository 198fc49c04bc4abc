"""Writing an artifact: whole or not at all, whatever happens in between."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_artifact import FILES, tiny_manifest, write_tiny_artifact

from runtime import artifact_writer
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.errors import ArtifactError

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    """Everything in `folder`, hidden things too."""
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(1)])
def test_nothing_is_left_when_the_work_fails(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), ArtifactWriter(tmp_path / "tiny") as writer:  # noqa: PT012
        (writer.path / "engine.bin").write_bytes(b"half")
        raise error
    assert names(tmp_path) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "tiny") as writer:
        (writer.path / "engine.bin").write_bytes(b"half")
    assert names(tmp_path) == []
    with pytest.raises(RuntimeError, match="valid only"):
        writer.path  # noqa: B018


def test_nothing_unfinished_loads(tmp_path: Path) -> None:
    """At every step of the writing, a reader finds a whole artifact or none."""
    target = tmp_path / "tiny"
    with ArtifactWriter(target) as writer:
        for name, data in FILES.items():
            (writer.path / name).write_bytes(data)
            with pytest.raises(ArtifactError):
                Artifact.open(target)
            with pytest.raises(ArtifactError):
                Artifact.open(writer.path)
        writer.commit(tiny_manifest())
        Artifact.open(target, verify="full")
    assert names(tmp_path) == ["tiny"]


def test_makes_the_parents_and_takes_an_empty_folder(tmp_path: Path) -> None:
    Artifact.open(write_tiny_artifact(tmp_path / "a" / "b" / "tiny"))
    (tmp_path / "empty").mkdir()
    Artifact.open(write_tiny_artifact(tmp_path / "empty"))


def test_replacing_keeps_mapped_files_alive(tmp_path: Path) -> None:
    target = write_tiny_artifact(tmp_path / "tiny")
    with (target / "engine.bin").open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with ArtifactWriter(target) as writer:
        for name in FILES:
            (writer.path / name).write_bytes(b"new")
        Artifact.open(target, verify="full")  # the old one, up to the commit
        writer.commit(tiny_manifest())
    assert view[:] == FILES["engine.bin"]
    assert Artifact.open(target, verify="full").file("engine.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["tiny"]


def test_a_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tiny_artifact(tmp_path / "tiny")
    real, calls = Path.rename, []

    def rename(self: Path, to: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(target) as writer:  # noqa: PT012
        (writer.path / "engine.xml").write_bytes(b"new")
        writer.commit(tiny_manifest())
    assert len(calls) == 3
    Artifact.open(target, verify="full")
    assert names(tmp_path) == ["tiny"]


def test_readers_never_see_half_of_a_replacement(tmp_path: Path) -> None:
    """Between two renames the name may be missing for an instant, but what opens is whole."""
    target = write_tiny_artifact(tmp_path / "tiny")
    stop, whole, wrong = threading.Event(), 0, []

    def read() -> None:
        nonlocal whole
        while not stop.is_set():
            try:
                Artifact.open(target, verify="full")
                whole += 1
            except ArtifactError as error:
                if "changed" in str(error) or "JSON" in str(error):
                    wrong.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        write_tiny_artifact(target)
    stop.set()
    reader.join()
    assert whole > 0
    assert wrong == []


def test_what_is_not_an_artifact_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("years of work")
    (folder / "manifest.json").write_text('{"manifest_version": 3, "name": "a browser extension"}')
    with pytest.raises(ArtifactError, match=r"thesis: exists and is not an artifact \(2 other files\).*--out"):
        ArtifactWriter(folder).__enter__()
    assert names(folder) == ["chapter1.txt", "manifest.json"]
    (tmp_path / "file").write_text("text")
    with pytest.raises(ArtifactError, match="is not a folder"):
        ArtifactWriter(tmp_path / "file").__enter__()
    with pytest.raises(ArtifactError, match=r"below: cannot be made in .*file, which is no folder"):
        ArtifactWriter(tmp_path / "file" / "below").__enter__()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ArtifactError, match="is not a folder"):
        ArtifactWriter(tmp_path / "link").__enter__()


def test_an_artifact_with_someone_s_notes_is_not_overwritten(tmp_path: Path) -> None:
    target = write_tiny_artifact(tmp_path / "tiny")
    (target / "notes.md").write_text("mine")
    with pytest.raises(ArtifactError, match=r"notes.md, which the build did not put there"):
        write_tiny_artifact(target)
    assert (target / "notes.md").read_text() == "mine"


def test_a_damaged_artifact_can_be_rebuilt(tmp_path: Path) -> None:
    target = write_tiny_artifact(tmp_path / "tiny")
    (target / "manifest.json").write_text("{")
    write_tiny_artifact(target)
    (target / "manifest.json").unlink()
    Artifact.open(write_tiny_artifact(target), verify="full")


def test_only_regular_files_become_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("")
    for make in (lambda path: path.symlink_to(tmp_path / "outside"), lambda path: path.mkdir()):
        with pytest.raises(ArtifactError, match="no regular file"), ArtifactWriter(tmp_path / "tiny") as writer:  # noqa: PT012
            make(writer.path / "engine.bin")
            writer.commit(tiny_manifest())
    assert names(tmp_path) == ["outside"]


_KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from runtime.artifact_writer import ArtifactWriter
with ArtifactWriter(sys.argv[1]) as writer:
    (writer.path / "engine.bin").write_bytes(b"half")
    print(writer.path, flush=True)
    time.sleep(60)
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    command = [sys.executable, "-c", _KILLED.format(root=str(ROOT)), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    with ArtifactWriter(target):
        assert left.exists(), "the folder of a living writer was taken away"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert left.exists()
    write_tiny_artifact(tmp_path / "another")  # any writer in the folder cleans up
    assert names(tmp_path) == ["another"]


def test_an_artifact_moved_away_by_a_killed_writer_comes_back(tmp_path: Path) -> None:
    target = write_tiny_artifact(tmp_path / "tiny")
    dead = subprocess.Popen(["true"])
    dead.wait()
    target.rename(tmp_path / f".tiny.replaced-{dead.pid}-00000000")
    with ArtifactWriter(target):
        Artifact.open(target, verify="full")
    shutil.copytree(target, tmp_path / f".tiny.replaced-{dead.pid}-00000000")
    write_tiny_artifact(target)
    assert names(tmp_path) == ["tiny"]


def test_a_reused_process_number_does_not_keep_a_leftover_for_ever(tmp_path: Path) -> None:
    left = tmp_path / f".tiny.writing-{os.getpid()}-00000000"
    left.mkdir()
    with ArtifactWriter(tmp_path / "tiny"):
        assert left.exists()
    old = time.time() - 3600
    os.utime(left, (old, old))
    with ArtifactWriter(tmp_path / "tiny"):
        assert not left.exists()


def test_case_23_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    """A real EFBIG from the kernel, in a process of its own."""
    code = f"""
import signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests/support")!r}]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
from tiny_artifact import write_tiny_artifact
from runtime.errors import ArtifactError
from pathlib import Path
try:
    write_tiny_artifact(Path(sys.argv[1]))
except ArtifactError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "tiny")], capture_output=True, text=True)
    assert "File too large while writing" in done.stdout, done.stderr
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_case_23_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(ArtifactError) as caught, ArtifactWriter(disk / "tiny") as writer:
            (writer.path / "engine.bin").write_bytes(bytes(1 << 20))
        assert str(caught.value).count("\n") == 0
        assert os.strerror(errno.ENOSPC) in str(caught.value)
        assert names(disk) == []
        Artifact.open(write_tiny_artifact(disk / "tiny"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_other_errors_of_the_system_pass_through(tmp_path: Path) -> None:
    assert not artifact_writer.is_out_of_space(FileNotFoundError(errno.ENOENT, "none"))
    with pytest.raises(FileNotFoundError), ArtifactWriter(tmp_path / "tiny") as writer:
        (writer.path / "absent").read_bytes()
