"""The artifact's tokenizer: `tokenizer.json` through the `tokenizers` library, and what the serving side asks of it.

Tokens have true bytes here: byte-level BPE's printable aliases (GPT-2's `bytes_to_unicode`) are undone, and
SentencePiece's `<0xE2>` and its space mark are the byte and the space that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from runtime.detokenizer import IncrementalDetokenizer
from runtime.errors import ArtifactError, RequestError
from runtime.token_pieces import Pieces, pieces_for


class Tokenizer:
    """Text to token ids and back. Build one with `Tokenizer.load(folder)`.

    `pieces` says what each token contributes to a text; `special_tokens` holds the names under which chat templates
    know the special tokens (`bos_token`, `eos_token`, ...).
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict | None = None):
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        config = config or {}
        self.config = config
        self.special_tokens = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _token_text(value))
        }
        self.added_tokens = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        self.special_token_ids = frozenset(
            id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        frame = backend.encode("").ids  # what is added to every text
        self._frame_starts_with_bos = self.bos_token_id is not None and frame[:1] == [self.bos_token_id]
        # `add_bos_token` of the config wins over the file's post-processor, as in transformers.
        wanted = config.get("add_bos_token")
        self.adds_bos = self.bos_token_id is not None and (
            self._frame_starts_with_bos if not isinstance(wanted, bool) else wanted
        )

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and `tokenizer_config.json`. Raises `ArtifactError` where they do not serve."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError(f"no tokenizer.json in {folder}: the tokenizers library needs that file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"cannot read {path}: {error}") from error
        return cls(backend, read_json(folder / "tokenizer_config.json"))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. An engine's logits may be wider (padding)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def pieces(self) -> Pieces:
        return pieces_for(self._backend)

    def to_json(self) -> str:
        """The whole tokenizer as `tokenizer.json` text."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With special tokens, a text that holds BOS at its start already gets no second one.

        Raises `RequestError` for what is not Unicode text.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                f"the text cannot be tokenized, it is not valid Unicode text: {error}", "prompt"
            ) from error
        return self._with_one_bos(ids) if add_special_tokens and self.bos_token_id is not None else ids

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        if self._frame_starts_with_bos:
            held = ids[1:2] == [bos]
            return ids if self.adds_bos and not held else ids[1:]
        if self.adds_bos and ids[:1] != [bos]:
            return [bos, *ids]  # type: ignore[list-item]
        return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `token_ids`. Ids that no token has are skipped. Raises `RequestError` for what cannot be an id."""
        try:
            if not spaces_between_special_tokens and not skip_special_tokens:
                stream = IncrementalDetokenizer(self, skip_special_tokens=False, spaces_between_special_tokens=False)
                return "".join(map(stream.append, token_ids)) + stream.flush()
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids must be whole numbers from 0 to 2^32 - 1: {error}", "tokens") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for inside a text (b"" for an id that no token has)."""
        return self.pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        r"""The token for people: its text, with bytes that are no whole character as `\xe2`."""
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, aliases and all."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """The ids that end a text, of a model folder: generation_config.json's, else the tokenizer's EOS."""
    ids = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = Tokenizer.load(folder).eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def read_json(path: Path) -> dict:
    """A JSON object from a file, {} where there is none. Raises `ArtifactError` where it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):  # a serialized AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None
