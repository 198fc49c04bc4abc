"""Small real tokenizers, trained in memory on a few sentences: one of each kind that models use.

`KINDS`: "byte_level" (GPT-2, Llama 3, Qwen), "byte_fallback" (SentencePiece as in Llama 2), "wordpiece" (BERT) and
"metaspace" (SentencePiece with no byte fallback). `write_tiny_tokenizer` writes a model folder's tokenizer files.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

KINDS = ("byte_level", "byte_fallback", "wordpiece", "metaspace")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It wasn't the first time, and it won't be the last!",
    "Paris is the capital of France; Praha je hlavní město České republiky, loď pluje a děti jdou domů.",
    "Streaming text must never hold half a character: naïve café, Größe, ďábel, 日本語, Ελληνικά, 🙂 and 👩‍👩‍👧.",
    "def main(argv: list[str]) -> int:\n    return {'key': [1, 2, 3.5], 'other': None}['key'][0]\n",
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "nested": {"ok": true, "nothing": null}}\n',
    "DEF DE D E F stop Stop STOP </s> <think> </think> end END The answer is 42. Yes, no, maybe.",
]

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_backend(kind: str = "byte_level", vocab_size: int = 512) -> Tokenizer:
    """A `tokenizers.Tokenizer` of that kind, of at most `vocab_size` ids, fresh for each caller."""
    return Tokenizer.from_str(_trained(kind, vocab_size))


def tiny_tokenizer(kind: str = "byte_level", vocab_size: int = 512):
    """The runtime's `Tokenizer` over `tiny_backend`."""
    from runtime.tokenizer import Tokenizer as RuntimeTokenizer

    return RuntimeTokenizer(tiny_backend(kind, vocab_size), tiny_config(kind))


def tiny_config(kind: str = "byte_level") -> dict:
    """`tokenizer_config.json`'s content."""
    config: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **_SPECIAL[kind]}
    if kind == "byte_level":
        config["chat_template"] = CHATML
    return config


def write_tiny_tokenizer(folder: str | Path, kind: str = "byte_level", vocab_size: int = 512) -> Path:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json (and a ChatML template for byte_level)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend = tiny_backend(kind, vocab_size)
    backend.save(str(folder / "tokenizer.json"))
    config = tiny_config(kind)
    template = config.pop("chat_template", None)
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    ids = {name: backend.token_to_id(config[name]) for name in ("bos_token", "eos_token") if name in config}
    generation = {f"{name}_id": token_id for name, token_id in ids.items()}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


_SPECIAL = {
    "byte_level": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "byte_fallback": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "wordpiece": {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
    "metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}


@lru_cache
def _trained(kind: str, vocab_size: int) -> str:
    return _MAKERS[kind](vocab_size).to_str()


def _byte_level(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    # Added tokens that are text and not special, as reasoning markers are.
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer


def _byte_fallback(vocab_size: int) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    learner = Tokenizer(models.BPE())
    learner.normalizer = _sentencepiece_normalizer()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False)
    # ASCII alone is learnt: every other character comes as byte tokens.
    learner.train_from_iterator([text.encode("ascii", "ignore").decode() for text in SENTENCES * 4], trainer)
    learned = json.loads(learner.to_str())["model"]
    names = [*special, *byte_tokens, *sorted(learned["vocab"], key=learned["vocab"].get)]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = _sentencepiece_normalizer()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _sentencepiece_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _wordpiece(vocab_size: int) -> Tokenizer:
    """Every second word, and every character at the start of a word and inside (its trainer is not deterministic)."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
    texts = [normalizer.normalize_str(text) for text in SENTENCES]
    words = sorted({word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text)})
    letters = sorted({char for word in words for char in word})
    names = [*special, *letters, *(f"##{char}" for char in letters), *(word for word in words[::2] if len(word) > 1)]
    vocab = {name: index for index, name in enumerate(names[:vocab_size])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def _metaspace(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer


_MAKERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "wordpiece": _wordpiece,
    "metaspace": _metaspace,
}
