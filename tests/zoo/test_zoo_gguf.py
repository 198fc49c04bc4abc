"""GGUF files: exact weights, the tokenizer's splitting rule, and every kind of damage."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hf import CONTEXT, write_tiny_gguf

import zoo
from runtime.errors import ZooError
from zoo.gguf_header import GGML_TYPES, read_gguf_header


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def leftovers(home: Path) -> list[Path]:
    """Anything a failed conversion left in the store."""
    return list((home / "models").rglob("*")) if (home / "models").is_dir() else []


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_weights_come_out_exactly(tmp_path: Path, quantization: str) -> None:
    kept = write_tiny_gguf(tmp_path / "tiny.gguf", quantization=quantization)
    checkpoint = zoo.resolve(f"gguf:{tmp_path / 'tiny.gguf'}")
    refs = checkpoint.tensors()
    assert refs.keys() == kept.keys()
    for name, ref in refs.items():
        data = ref.file.read_bytes()[ref.offset : ref.offset + ref.nbytes]
        assert ref.dtype == "F32"
        assert np.array_equal(np.frombuffer(data, np.float32).reshape(ref.shape), kept[name]), name


def test_what_the_folder_says(file: Path) -> None:
    checkpoint = zoo.resolve(f"gguf:{file}")
    assert (checkpoint.name, checkpoint.source, checkpoint.license) == ("tiny", "gguf", "mit")
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.config["rms_norm_eps"] == 1e-05, "spelled with the fewest digits"
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.context_length == CONTEXT
    assert "<|im_start|>" in (checkpoint.chat_template or "")
    generation = json.loads((checkpoint.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == checkpoint.config["eos_token_id"]
    settings_ = json.loads((checkpoint.folder / "tokenizer_config.json").read_text())
    assert settings_["model_max_length"] == CONTEXT
    assert settings_["eos_token"] == "<|im_end|>"


def test_smollm_digits_are_tokens_of_their_own(file: Path) -> None:
    """transformers' conversion forgets the digit splitting that `tokenizer.ggml.pre: smollm` asks for."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(zoo.resolve(f"gguf:{file}").folder / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 2024")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer.encode("It is 2024, é!").ids) == "It is 2024, é!"
    assert tokenizer.encode("<|im_start|>").tokens == ["<|im_start|>"]


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_bos_as_the_file_says(tmp_path: Path, add_bos: bool | None) -> None:
    """Case 18 hangs on it: a tokenizer that adds BOS must be known as one."""
    from tokenizers import Tokenizer

    metadata = {} if add_bos is None else {"tokenizer.ggml.add_bos_token": add_bos}
    write_tiny_gguf(tmp_path / "t.gguf", metadata=metadata)
    folder = zoo.resolve(f"gguf:{tmp_path / 't.gguf'}").folder
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").tokens
    assert (tokens[0] == "<|im_start|>") == bool(add_bos)


def test_converted_once(file: Path) -> None:
    first = zoo.resolve(f"gguf:{file}")
    stamp = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert zoo.resolve(str(file)).folder == first.folder
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_damaged_copy_is_made_anew(file: Path) -> None:
    first = zoo.resolve(f"gguf:{file}")
    good = (first.folder / "model.safetensors").read_bytes()
    (first.folder / "model.safetensors").write_bytes(good[:-1])
    assert zoo.resolve(f"gguf:{file}").weight_files()[0].read_bytes() == good


def test_end_of_turn_tokens_end_a_generation(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    checkpoint = zoo.resolve(f"gguf:{tmp_path / 't.gguf'}")
    generation = json.loads((checkpoint.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [checkpoint.config["eos_token_id"], 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "rwkv7"}, "architecture 'rwkv7' cannot be converted"),
        ({"pre": "nobody-knows"}, "pre-tokenizer is 'nobody-knows', which is not known"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "RoPE scaling"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(tmp_path: Path, home: Path, options: dict, message: str) -> None:
    write_tiny_gguf(tmp_path / "t.gguf", **options)
    with pytest.raises(ZooError, match=message) as caught:
        zoo.resolve(f"gguf:{tmp_path / 't.gguf'}")
    assert "\n" not in str(caught.value)
    assert not leftovers(home)


def test_a_missing_weight_is_not_left_at_random(tmp_path: Path, home: Path) -> None:
    """A layer more than there are weights for: transformers would initialize it at random."""
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path)
    key = b"llama.block_count"
    content = bytearray(path.read_bytes())
    at = content.index(key) + len(key) + 4
    assert struct.unpack_from("<I", content, at) == (2,)
    struct.pack_into("<I", content, at, 3)
    path.write_bytes(content)
    with pytest.raises(ZooError, match=r"missing keys after the conversion \(9, first model\.layers\.2\."):
        zoo.resolve(f"gguf:{path}")
    assert not leftovers(home)


@pytest.mark.parametrize("cut", [0, 3, 23, 24, 100, 5000, -1000, -1])
def test_truncated(tmp_path: Path, home: Path, file: Path, cut: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ZooError, match=r"truncated|not a GGUF file") as caught:
        zoo.resolve(f"gguf:{path}")
    assert str(path) in str(caught.value)
    assert not leftovers(home)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), "GGUF version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "little endian"),
        (8, struct.pack("<Q", 1 << 60), "truncated or corrupt|corrupt"),
        (16, struct.pack("<Q", 1 << 60), "truncated or corrupt|corrupt"),
        (24, struct.pack("<Q", 1 << 60), "truncated or corrupt"),
    ],
)
def test_corrupt_headers(tmp_path: Path, file: Path, offset: int, value: bytes, message: str) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ZooError, match=message):
        read_gguf_header(tmp_path / "bad.gguf")


def test_unsupported_type_of_weights(tmp_path: Path, file: Path) -> None:
    content = bytearray(file.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    num_dims = struct.unpack_from("<I", content, at)[0]
    struct.pack_into("<I", content, at + 4 + 8 * num_dims, 39)  # MXFP4
    (tmp_path / "t.gguf").write_bytes(content)
    with pytest.raises(ZooError, match=r"'blk\.0\.attn_q\.weight' has the GGML type 39.*supported: F32, F16"):
        zoo.resolve(f"gguf:{tmp_path / 't.gguf'}")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 20_000), value=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused_quickly(
    tmp_path_factory: pytest.TempPathFactory, file: Path, position: int, value: int
) -> None:
    content = bytearray(file.read_bytes())
    content[position % len(content)] = value
    path = tmp_path_factory.mktemp("fuzz") / "t.gguf"
    path.write_bytes(content)
    try:
        header = read_gguf_header(path)
    except ZooError:
        return
    assert all(tensor.offset + tensor.nbytes <= len(content) for tensor in header.tensors)


def test_our_table_of_types_is_ggufs_own() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import _type_traits

    for number, (name, elements, nbytes) in GGML_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (elements, nbytes))
        assert name in ("F32", "F16") or kind in _type_traits, f"gguf cannot dequantize {name}"


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="no GGUF file at"):
        zoo.resolve(f"gguf:{tmp_path}/none.gguf")


def test_not_enough_memory_or_disk(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 23: estimated first, refused with the numbers, nothing left behind."""
    import shutil

    from runtime.memory import FreeMemory

    monkeypatch.setattr("zoo.store.available_memory", lambda: FreeMemory(1000, "machine"))
    with pytest.raises(ZooError, match=r"takes .* of memory, and 1000 bytes are free"):
        zoo.resolve(f"gguf:{file}")
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ZooError, match=r"takes .* where 1000 bytes are free"):
        zoo.resolve(f"gguf:{file}")
    assert not leftovers(home)


def test_a_disk_that_fills_up_meanwhile(file: Path, home: Path) -> None:
    """Case 23: a write that fails (here: by a limit on a file's size) is one line, and nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ZooError, match=r"cannot write the f32 copy of tiny\.gguf") as caught:
            zoo.resolve(f"gguf:{file}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert not leftovers(home)


def test_interrupted_conversion_leaves_nothing(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.gguf_convert._write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zoo.resolve(f"gguf:{file}")
    assert not leftovers(home)
