"""The tokenizer: what it adds, what its tokens are, and how it fails; case 18."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizer import KINDS, SENTENCES, tiny_backend, tiny_config, tiny_tokenizer, write_tiny_tokenizer
from tokenizers import processors

from runtime.errors import ArtifactError, RequestError
from runtime.tokenizer import Tokenizer, read_eos_token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_load_gives_the_special_tokens(tmp_path, kind):
    tokenizer = Tokenizer.load(write_tiny_tokenizer(tmp_path, kind))
    config = tiny_config(kind)
    assert tokenizer.id_to_token(tokenizer.bos_token_id) == config["bos_token"]
    assert tokenizer.id_to_token(tokenizer.eos_token_id) == config["eos_token"]
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} <= tokenizer.special_token_ids
    assert tokenizer.vocab_size <= 512
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert read_eos_token_ids(tmp_path) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(write_tiny_tokenizer(tmp_path, kind))
    ours = Tokenizer.load(tmp_path)
    for text in [*SENTENCES, "", " ", "<|im_start|>user\n</s>[SEP]"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


def test_case_18_bos_is_added_once():
    tokenizer = tiny_tokenizer("byte_fallback")
    bos = tokenizer.bos_token_id
    assert tokenizer.adds_bos
    assert tokenizer.encode("The fox")[0] == bos
    assert tokenizer.encode("<s>The fox").count(bos) == 1
    assert tokenizer.encode("<s>The fox", add_special_tokens=False).count(bos) == 1
    assert tokenizer.encode("The fox", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("<s>") == [bos]
    assert tokenizer.encode("The <s> fox").count(bos) == 2  # BOS inside a text is the text's own


def test_a_bos_that_also_opens_each_message_stays():
    """As in ChatML, where BOS is <|im_start|>: nothing is taken away where nothing is added."""
    tokenizer = tiny_tokenizer("byte_level")
    text = "<|im_start|><|im_start|>user"
    assert tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("framed", "wanted", "count"),
    [(True, None, 1), (True, True, 1), (True, False, 0), (False, True, 1), (False, None, 0)],
)
def test_add_bos_token_of_the_config_wins(framed, wanted, count):
    backend = tiny_backend("byte_fallback")
    if not framed:
        backend.post_processor = processors.ByteLevel()
    config = {**tiny_config("byte_fallback"), **({} if wanted is None else {"add_bos_token": wanted})}
    tokenizer = Tokenizer(backend, config)
    assert tokenizer.encode("The fox").count(1) == count
    assert tokenizer.encode("<s>The fox").count(1) == 1


def test_bytes_of_every_token():
    byte_level = tiny_tokenizer("byte_level")
    assert {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)} >= {bytes([b]) for b in range(256)}
    assert byte_level.token_bytes(byte_level.token_to_id("Ġthe")) == b" the"
    assert byte_level.token_bytes(byte_level.eos_token_id) == b"<|im_end|>"
    fallback = tiny_tokenizer("byte_fallback")
    assert fallback.token_bytes(fallback.token_to_id("<0xE2>")) == b"\xe2"
    words = [token for i in range(fallback.vocab_size) if (token := fallback.id_to_token(i)).startswith("▁")]
    assert len(words) > 5
    for word in words:
        assert fallback.token_bytes(fallback.token_to_id(word)) == word.replace("▁", " ").encode()
    wordpiece = tiny_tokenizer("wordpiece")
    assert wordpiece.token_bytes(wordpiece.token_to_id("fox")) == b" fox"
    assert wordpiece.token_bytes(wordpiece.token_to_id("##e")) == b"e"
    assert wordpiece.token_bytes(wordpiece.token_to_id(".")) == b"."


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_no_token_has(kind):
    tokenizer = tiny_tokenizer(kind)
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.decode([10**6]) == ""
    for bad in ([-1], [2**40], ["x"], [None]):
        with pytest.raises(RequestError, match="token ids must be"):
            tokenizer.decode(bad)


def test_text_that_is_no_unicode():
    with pytest.raises(RequestError, match="not valid Unicode"):
        tiny_tokenizer().encode("\ud800")


def test_padding_and_truncation_of_the_file_are_off():
    backend = tiny_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend).encode("The quick brown fox")) > 2
    assert len(Tokenizer(backend).encode("a")) == 1


def test_special_tokens_as_objects_and_missing():
    tokenizer = Tokenizer(
        tiny_backend(), {"bos_token": {"content": "<|im_start|>"}, "eos_token": None, "x_token": "nowhere"}
    )
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id is None
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "x_token": "nowhere"}


def test_damaged_folders(tmp_path):
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).bos_token_id is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(ArtifactError, match="cannot read"):
        Tokenizer.load(tmp_path)
