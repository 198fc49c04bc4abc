"""What each token of a vocabulary contributes to a text, by the kind of the tokenizer's decoder.

- `BytePieces`: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM). A token is bytes; a text is their UTF-8.
- `FallbackPieces`: SentencePiece with byte fallback (Llama 2, Mistral, Gemma). A token is text or one byte.
- `ContextPieces`: the rest (WordPiece, Metaspace, ...): a token's text depends on whether another comes before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tokenizers


def _bytes_of_aliases() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    aliases = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return aliases | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALIASES = _bytes_of_aliases()


class Pieces:
    """Looks tokens up, each once."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._cache: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes inside a text; b"" for an id that no token has."""
        found = self._cache.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            found = self._cache[token_id] = b"" if token is None else self._bytes_of(token_id, token)
        return found

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        raise NotImplementedError


class BytePieces(Pieces):
    """Byte-level BPE. A token with a character that is no alias (an added one) is its own UTF-8."""

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        try:
            return bytes([_ALIASES[char] for char in token])
        except KeyError:
            return token.encode()


@dataclass(frozen=True)
class FallbackRules:
    """A `Sequence[Replace..., ByteFallback, Fuse, Strip?]` decoder."""

    replaces: tuple[tuple[str, str], ...]
    strip_char: str = ""
    strip_start: int = 0  # so many of `strip_char` are dropped from the very start of a text


class FallbackPieces(Pieces):
    """SentencePiece with byte fallback."""

    def __init__(self, backend: tokenizers.Tokenizer, rules: FallbackRules):
        super().__init__(backend)
        self.rules = rules
        self._byte_tokens: dict[int, bool | None] = {}

    def is_byte(self, token_id: int) -> bool | None:
        """Whether the token is one raw byte (`<0x0A>`) and not text; None for an id that no token has."""
        if token_id not in self._byte_tokens:
            token = self._backend.id_to_token(token_id)
            self._byte_tokens[token_id] = None if token is None else _fallback_byte(self._replaced(token)) is not None
        return self._byte_tokens[token_id]

    def _replaced(self, token: str) -> str:
        for pattern, content in self.rules.replaces:
            token = token.replace(pattern, content)
        return token

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        text = self._replaced(token)
        byte = _fallback_byte(text)
        return text.encode() if byte is None else bytes([byte])


class ContextPieces(Pieces):
    """Any other decoder. `holds_bytes`: it may turn several tokens into one character."""

    def __init__(self, backend: tokenizers.Tokenizer, holds_bytes: bool):
        super().__init__(backend)
        self.holds_bytes = holds_bytes
        self._anchor: int | None = None

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if self._anchor is None:  # any token with text: what counts is that one comes before
            ids = range(self._backend.get_vocab_size())
            self._anchor = next((id_ for id_ in ids if self.decode([id_]).strip()), 0)
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token_id])[len(before) :].encode()


def pieces_for(backend: tokenizers.Tokenizer) -> Pieces:
    """The pieces of a tokenizer, by its decoder."""
    decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] or kinds == ["ByteLevel", "Fuse"]:
        return BytePieces(backend)
    rules = _fallback_rules(parts)
    if rules is not None:
        return FallbackPieces(backend, rules)
    return ContextPieces(backend, holds_bytes="ByteLevel" in kinds or "ByteFallback" in kinds)


def _fallback_rules(parts: list[dict]) -> FallbackRules | None:
    rest = list(parts)
    replaces = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        part = rest.pop(0)
        replaces.append((part["pattern"]["String"], part["content"]))
    if [part["type"] for part in rest[:2]] != ["ByteFallback", "Fuse"]:
        return None
    rest = rest[2:]
    if not rest:
        return FallbackRules(tuple(replaces))
    if len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        return FallbackRules(tuple(replaces), rest[0]["content"], rest[0]["start"])
    return None


def _fallback_byte(token: str) -> int | None:
    if len(token.encode()) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16) if token[3:5].isalnum() else None
    except ValueError:
        return None
