"""The hub, spoken to over HTTP: a real server of its API on a local port."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hub_server import HubServer, Repo
from tiny_hf import write_tiny_hf

import zoo
from runtime.errors import ZooError
from zoo.sources.hub import hub_cache

REPO = "owner/tiny"


class Notes:
    """Keeps what a pull says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.updates: list[tuple[str, int, int | None]] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def update(self, task: str, done: int, total: int | None) -> None:
        self.updates.append((task, done, total))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_hf(tmp_path / "tiny")


def big_repo(hub: HubServer, folder: Path) -> Repo:
    """A model whose weights are large enough to be fetched resumably: 3 MiB of one tensor."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.random.default_rng(0).random(3 << 18).astype(np.float32)}, folder / "model.safetensors")
    return hub.add(REPO, folder)


def test_pulls_a_model_and_says_where_it_came_from(hub: HubServer, folder: Path) -> None:
    repo = hub.add(REPO, folder, tags=["license:mit"])
    notes = Notes()
    checkpoint = zoo.resolve(f"hub:{REPO}", progress=notes)
    assert checkpoint.source == f"hub:{REPO}"
    assert checkpoint.revision == repo.commit
    assert checkpoint.license == "mit"
    assert checkpoint.sha256 == repo.etag("model.safetensors")
    (weights,) = checkpoint.weight_files()
    assert not weights.is_symlink(), "loaders refuse links"
    assert weights.read_bytes() == repo.files["model.safetensors"]
    assert set(checkpoint.tensors()) == {t for t in checkpoint.tensors() if t.startswith("model.")} != set()
    assert (checkpoint.folder / "tokenizer.json").is_file()
    assert checkpoint.chat_template
    assert any(task == "fetching model.safetensors" for task, _, _ in notes.updates)


def test_second_resolve_asks_nothing(hub: HubServer, folder: Path) -> None:
    hub.add(REPO, folder)
    first = zoo.resolve(f"hub:{REPO}")
    asked = len(hub.requests)
    second = zoo.resolve(f"hub:{REPO}")
    assert len(hub.requests) == asked
    assert (second.folder, second.revision, second.sha256) == (first.folder, first.revision, first.sha256)


def test_pull_refreshes_to_the_newest_commit(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add(REPO, folder)
    old = zoo.resolve(f"hub:{REPO}")
    repo = hub.add(REPO, write_tiny_hf(tmp_path / "newer", seed=1))
    assert zoo.resolve(f"hub:{REPO}").revision == old.revision
    new = zoo.pull(f"hub:{REPO}")
    assert new.revision == repo.commit != old.revision
    assert new.sha256 != old.sha256
    assert zoo.resolve(f"hub:{REPO}").revision == repo.commit


def test_shards_and_only_what_a_build_reads(hub: HubServer, tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "sharded", shards=3)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"a second copy")
    (folder / "README.md").write_text("hello")
    hub.add(REPO, folder)
    checkpoint = zoo.resolve(f"hub:{REPO}")
    assert len(checkpoint.weight_files()) == 3
    names = {path.rsplit("/", 1)[-1] for method, path, _ in hub.requests if method == "GET"}
    assert not names & {"pytorch_model.bin", "consolidated.safetensors", "README.md"}


def test_a_pinned_revision_is_used(hub: HubServer, folder: Path) -> None:
    repo = hub.add(REPO, folder, branches=["main", "v1"])
    assert zoo.resolve(f"hub:{REPO}@v1").revision == repo.commit
    assert zoo.resolve(f"hub:{REPO}@{repo.commit}").revision == repo.commit
    with pytest.raises(ZooError, match=r"no revision 'v2'"):
        zoo.resolve(f"hub:{REPO}@v2")


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_broken_line_is_resumed(hub: HubServer, folder: Path, ignore_ranges: bool) -> None:
    repo = big_repo(hub, folder)
    repo.drops["model.safetensors"] = [1 << 20, 1 << 19]
    repo.ignore_ranges = ignore_ranges
    notes = Notes()
    checkpoint = zoo.resolve(f"hub:{REPO}", progress=notes)
    assert checkpoint.weight_files()[0].read_bytes() == repo.files["model.safetensors"]
    ranges = hub.gets("model.safetensors")
    assert ranges[0] is None
    assert ranges[1] == f"bytes={1 << 20}-"
    assert sum("resuming" in note for note in notes.notes) == 2


def test_a_pull_goes_on_where_the_last_one_stopped(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one byte more from the server the pull gives up; the next one asks for the rest only."""
    monkeypatch.setattr("zoo.sources.hub._MAX_TRIES", 2)
    repo = big_repo(hub, folder)
    repo.drops["model.safetensors"] = [1 << 20, *[0] * 20]
    with pytest.raises(ZooError, match="cannot be reached"):
        zoo.resolve(f"hub:{REPO}")
    repo.drops.clear()
    before = len(hub.gets("model.safetensors"))
    checkpoint = zoo.resolve(f"hub:{REPO}")
    assert hub.gets("model.safetensors")[before:] == [f"bytes={1 << 20}-"]
    assert checkpoint.weight_files()[0].read_bytes() == repo.files["model.safetensors"]
    assert not list(hub_cache().rglob("*plancast-part"))


def test_a_partial_file_larger_than_the_whole_is_dropped(hub: HubServer, folder: Path) -> None:
    repo = big_repo(hub, folder)
    blobs = hub_cache() / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{repo.etag('model.safetensors')}.plancast-part").write_bytes(bytes(4 << 20))
    assert zoo.resolve(f"hub:{REPO}").weight_files()[0].read_bytes() == repo.files["model.safetensors"]


@pytest.mark.parametrize("big", [False, True])
def test_bytes_that_are_not_what_was_promised_are_refused(hub: HubServer, folder: Path, big: bool) -> None:
    repo = big_repo(hub, folder) if big else hub.add(REPO, folder)
    repo.corrupt.add("model.safetensors")
    with pytest.raises(ZooError, match=r"model\.safetensors .*SHA-256"):
        zoo.resolve(f"hub:{REPO}")
    assert not [path for path in hub_cache().rglob("*.safetensors") if path.is_file()]
    repo.corrupt.clear()
    assert zoo.resolve(f"hub:{REPO}").sha256 == repo.etag("model.safetensors")


def test_gated_and_private(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, folder, gated=True, token="secret")
    with pytest.raises(ZooError, match=r"gated: accept its licence.*HF_TOKEN"):
        zoo.resolve(f"hub:{REPO}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert zoo.resolve(f"hub:{REPO}").source == f"hub:{REPO}"


@pytest.mark.parametrize(
    ("name", "message"), [("owner/none", "has no model owner/none"), ("a/b/c", "owner/name is expected")]
)
def test_no_such_model(hub: HubServer, name: str, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        zoo.resolve(f"hub:{name}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "pickled weights only.*any code"),
        ({"model.safetensors": None, "model.gguf": b"x"}, "GGUF weights only"),
        ({"model.safetensors": None}, "no safetensors weights"),
        ({"config.json": None}, "no config.json"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"config.json": b"{"}, "config.json is corrupt"),
        ({"model.safetensors": b"12345678901234567890"}, "truncated"),
    ],
)
def test_what_may_not_be_used(hub: HubServer, folder: Path, files: dict[str, bytes | None], message: str) -> None:
    repo = hub.add(REPO, folder)
    for name, data in files.items():
        if data is None:
            del repo.files[name]
        else:
            repo.files[name] = data
    with pytest.raises(ZooError, match=message):
        zoo.resolve(f"hub:{REPO}")


def test_remote_code_is_refused_before_any_weight_is_fetched(hub: HubServer, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    files = {"config.json": json.dumps(config).encode(), "modeling_own.py": b"class OwnModel: pass\n"}
    hub.add(REPO, folder, files=files)
    with pytest.raises(ZooError, match="trust_remote_code"):
        zoo.resolve(f"hub:{REPO}")
    assert not hub.gets("model.safetensors")
    assert not hub.gets("modeling_own.py")
    trusted = zoo.resolve(f"hub:{REPO}", trust_remote_code=True)
    assert (trusted.folder / "modeling_own.py").is_file()
    with pytest.raises(ZooError, match="trust_remote_code"):
        zoo.resolve(f"hub:{REPO}")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    repo = hub.add(REPO, folder)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ZooError, match=rf"{variable} is set, and {REPO} at main is not in"):
        zoo.resolve(f"hub:{REPO}")
    assert not hub.requests
    monkeypatch.delenv(variable)
    zoo.resolve(f"hub:{REPO}")
    asked = len(hub.requests)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PLANCAST_HOME", os.environ["PLANCAST_HOME"] + "-other")  # no record: the hub's cache alone
    checkpoint = zoo.pull(f"hub:{REPO}")
    assert checkpoint.revision == repo.commit
    assert len(hub.requests) == asked


def test_an_unreachable_hub_is_given_up_in_seconds(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ZooError, match=r"127\.0\.0\.1:9 cannot be reached"):
        zoo.resolve(f"hub:{REPO}")
    assert time.monotonic() - start < 10


def test_a_silent_hub_is_given_up_in_seconds(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the connection and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ZooError, match="cannot be reached"):
            zoo.resolve(f"hub:{REPO}")
        assert time.monotonic() - start < 15


def test_two_pulls_at_once_fetch_once(hub: HubServer, folder: Path) -> None:
    repo = big_repo(hub, folder)
    results: list[object] = []

    def pull() -> None:
        try:
            results.append(zoo.resolve(f"hub:{REPO}").sha256)
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [repo.etag("model.safetensors")] * 3
    assert len(hub.gets("model.safetensors")) == 1


def test_remove_frees_the_cache(hub: HubServer, folder: Path) -> None:
    repo = hub.add(REPO, folder)
    checkpoint = zoo.resolve(f"hub:{REPO}")
    assert zoo.remove(f"hub:{REPO}") > len(repo.files["model.safetensors"])
    assert not checkpoint.folder.exists()
    with pytest.raises(ZooError, match="is not pulled"):
        zoo.remove(f"hub:{REPO}")
    assert zoo.resolve(f"hub:{REPO}").folder.is_dir()


def test_damage_to_the_cache_is_noticed_and_mended(hub: HubServer, folder: Path) -> None:
    hub.add(REPO, folder)
    checkpoint = zoo.resolve(f"hub:{REPO}")
    checkpoint.weight_files()[0].write_bytes(b"short")
    mended = zoo.resolve(f"hub:{REPO}")
    assert mended.weight_files()[0].stat().st_size > 1000
