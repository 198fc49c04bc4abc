"""Folders in Hugging Face form: what is read, and what is refused, each with one clear line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_hf import tiny_weights, write_tiny_hf

import zoo
from runtime.errors import ZooError
from zoo.safetensors_header import read_safetensors_header


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_hf(tmp_path / "tiny")


def header_bytes(header: object, payload: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_lie_where_the_refs_say(tmp_path: Path, shards: int) -> None:
    checkpoint = zoo.resolve(str(write_tiny_hf(tmp_path / "m", shards=shards)))
    weights = tiny_weights()
    refs = checkpoint.tensors()
    assert refs.keys() == weights.keys()
    for name, ref in refs.items():
        with ref.file.open("rb") as file:
            file.seek(ref.offset)
            data = file.read(ref.nbytes)
        assert ref.dtype == "F32"
        assert np.array_equal(np.frombuffer(data, np.float32).reshape(ref.shape), weights[name])
    assert len(checkpoint.weight_files()) == shards
    assert checkpoint.source == "folder"
    assert checkpoint.context_length == 256


def test_links_are_resolved(tmp_path: Path, folder: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    checkpoint = zoo.resolve(str(linked))
    assert checkpoint.weight_files() == [folder / "model.safetensors"]
    assert {ref.file for ref in checkpoint.tensors().values()} == {folder / "model.safetensors"}


def test_file_hashes_name_everything_a_build_reads(folder: Path) -> None:
    (folder / "notes.txt").write_text("not read")
    before = zoo.resolve(str(folder)).file_hashes()
    assert set(before) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file(tiny_weights(seed=1), folder / "model.safetensors")
    after = zoo.resolve(str(folder))
    changed = {name for name, digest in after.file_hashes().items() if digest != before[name]}
    assert changed == {"chat_template.jinja", "model.safetensors"}
    assert after.sha256 == after.file_hashes()["model.safetensors"]


def test_the_hash_of_a_large_file_is_remembered_until_it_changes(tmp_path: Path) -> None:
    from zoo.hashing import sha256_file

    class Counter:
        reads = 0

        def note(self, line: str) -> None: ...

        def update(self, task: str, done: int, total: int | None) -> None:
            self.reads += 1

    path = tmp_path / "big"
    path.write_bytes(bytes(17 << 20))
    counter = Counter()
    first = sha256_file(path, counter)
    reads = counter.reads
    assert reads
    assert sha256_file(path, counter) == first
    assert counter.reads == reads
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    assert sha256_file(path, counter) != first


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("several", [False, True])
def test_chat_template_from_whichever_file(folder: Path, where: str, several: bool) -> None:
    (folder / "chat_template.jinja").unlink()
    template = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}] if several else "yes"
    if where.endswith("jinja"):
        (folder / where).write_text("yes")
    else:
        (folder / where).write_text(json.dumps({"chat_template": template}))
    assert zoo.resolve(str(folder)).chat_template == "yes"


def test_no_chat_template_is_fine(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert zoo.resolve(str(folder)).chat_template is None


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "truncated"),
        (b"\x10\0\0", "truncated"),
        (header_bytes({}, length=1 << 62), "truncated"),
        (header_bytes(b"{not json"), "corrupt safetensors header"),
        (header_bytes(b"\xff\xfe"), "corrupt safetensors header"),
        (header_bytes(b"[" * 100_000), "corrupt safetensors header"),
        (header_bytes([1, 2]), "no JSON object"),
        (header_bytes({"w": {"dtype": "F32", "shape": [2]}}), "lacks dtype, shape or data_offsets"),
        (header_bytes({"w": 3}), "lacks dtype, shape or data_offsets"),
        (header_bytes({"w": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "unknown dtype 'F33'"),
        (header_bytes({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)), "no valid shape"),
        (header_bytes({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)), "no valid shape"),
        (header_bytes({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)), "takes 12 bytes"),
        (header_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7)), "truncated"),
        (header_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(9)), "belong to none"),
        (header_bytes({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "begins at byte"),
        (
            header_bytes(b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[0],'
                         b'"data_offsets":[1,1]}}', bytes(1)),
            "stands twice",
        ),
    ],
)  # fmt: skip
def test_bad_safetensors(folder: Path, header: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(header)
    with pytest.raises(ZooError, match=message) as caught:
        zoo.resolve(str(folder))
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_of_ours_or_reads_as_safetensors_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte of the header changes: either we refuse it, or the format's own reader agrees with us."""
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file({"a": np.arange(4, dtype=np.float32), "b": np.arange(6, dtype=np.float16).reshape(2, 3)}, path)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 30))
    content[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    path.write_bytes(content[: len(content) - cut])
    try:
        refs = read_safetensors_header(path)
    except ZooError:
        return
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(refs)
        for name in refs:
            assert tuple(file.get_slice(name).get_shape()) == refs[name].shape


def test_a_shard_missing_and_a_tensor_missing(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ZooError, match=r"1 tensors of its index are in no file, first model\.ghost"):
        zoo.resolve(str(folder))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ZooError, match=r"lacks 1 of 3 weight files, first model-00002"):
        zoo.resolve(str(folder))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin"])
def test_an_index_may_not_point_outside(tmp_path: Path, name: str) -> None:
    folder = write_tiny_hf(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ZooError, match="no safetensors file of its folder"):
        zoo.resolve(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ZooError, match=r"pickled weights only.*can run any code.*safetensors"):
        zoo.resolve(str(folder))


def test_several_safetensors_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert zoo.resolve(str(folder)).weight_files()[0].name == "a.safetensors"
    (folder / "b.safetensors").write_bytes(b"")
    with pytest.raises(ZooError, match=r"2 safetensors files and no model\.safetensors\.index"):
        zoo.resolve(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json is corrupt"),
        ("config.json", "[]", "config.json is corrupt: not a JSON object"),
        ("config.json", "{}", "names no model_type"),
        (
            "config.json",
            '{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}',
            r"quantized \(hqq\)",
        ),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", '{"model": ', "tokenizer.json is corrupt"),
        ("model.safetensors", None, "has no safetensors weights"),
    ],
)
def test_broken_folders(folder: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ZooError, match=message) as caught:
        zoo.resolve(str(folder))
    assert "\n" not in str(caught.value)


def test_remote_code(folder: Path) -> None:
    def set_auto_map(value: object) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": value}))

    set_auto_map({"AutoModelForCausalLM": "modeling_own.Own", "AutoTokenizer": [None, "tokenization_own.Own"]})
    with pytest.raises(ZooError, match=r"auto_map.*trust_remote_code: true"):
        zoo.resolve(str(folder))
    with pytest.raises(ZooError, match=r"names modeling_own\.py in auto_map, but the file is not there"):
        zoo.resolve(str(folder), trust_remote_code=True)
    (folder / "modeling_own.py").write_text("raise SystemExit('ran')\n")
    (folder / "tokenization_own.py").write_text("raise SystemExit('ran')\n")
    checkpoint = zoo.resolve(str(folder), trust_remote_code=True)
    assert "modeling_own.py" in checkpoint.file_hashes()
    set_auto_map({"AutoModelForCausalLM": "someone/else--modeling_own.Own"})
    with pytest.raises(ZooError, match="code of another repository"):
        zoo.resolve(str(folder), trust_remote_code=True)


def test_a_folder_of_gguf_files_says_how_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ZooError, match=r"no config\.json.*gguf:PATH"):
        zoo.resolve(str(tmp_path))
