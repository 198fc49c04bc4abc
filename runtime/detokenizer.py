"""Token ids to text, one at a time, each token in O(1): the pieces together are exactly the text of all ids at once.

Nothing is sent before it is certain: of a character that is still incomplete, no part and no U+FFFD leaves. What is
held at the end of the output comes by `flush`, as `decode` of all the ids shows it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from runtime.token_pieces import BytePieces, ContextPieces, FallbackPieces, Pieces

if TYPE_CHECKING:
    from runtime.tokenizer import Tokenizer

# So many of the prompt's last tokens are looked at as context.
_CONTEXT_TOKENS = 6
_UTF8_MAX = 4


class _Stream(Protocol):
    def prime(self, token_ids: Sequence[int]) -> None: ...

    def append(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """One sequence's text. `append` returns the text that its token made certain, `flush` the rest at the end.

    `prompt_token_ids` is context and adds no text: an output that goes on from it keeps its leading space, and
    completes a character that the prompt began. Without it the text is `Tokenizer.decode` of the ids alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ):
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        added = tokenizer.added_tokens if not (skip_special_tokens or spaces_between_special_tokens) else {}
        self._stream = _stream_for(tokenizer.pieces, added)
        # The last tokens suffice, as long as they are not all skipped ones.
        context = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in self._skipped]
        context = context or [i for i in prompt_token_ids if i not in self._skipped]
        if context:
            self._stream.prime(context)

    def append(self, token_id: int) -> str:
        """The text that is certain now and was not before ("" while a character is incomplete)."""
        return "" if token_id in self._skipped else self._stream.append(token_id)

    def flush(self) -> str:
        """The text still held, with U+FFFD for what never became a character. The output is over."""
        return self._stream.flush()


def _stream_for(pieces: Pieces, added_tokens: dict[int, str]) -> _Stream:
    if isinstance(pieces, BytePieces):
        return _ByteStream(pieces)
    if isinstance(pieces, FallbackPieces):
        return _FallbackStream(pieces)
    assert isinstance(pieces, ContextPieces)
    return _ContextStream(pieces, added_tokens)


class _ByteStream:
    """Byte-level BPE: an incremental UTF-8 decoder. Like the library's it puts one U+FFFD for a maximal broken part."""

    def __init__(self, pieces: BytePieces):
        self._token_bytes = pieces.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def prime(self, token_ids: Sequence[int]) -> None:
        tail = b""
        for token_id in reversed(token_ids):  # a character is at most four bytes: no earlier one can be pending
            tail = self._token_bytes(token_id) + tail
            if len(tail) >= _UTF8_MAX:
                break
        self._decode(tail)

    def append(self, token_id: int) -> str:
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class _FallbackStream:
    """SentencePiece with byte fallback: a run of byte tokens is text only as a whole, so it is held until it ends.

    A run that is no valid UTF-8 becomes one U+FFFD a byte.
    """

    def __init__(self, pieces: FallbackPieces):
        self._pieces = pieces
        self._run = bytearray()
        self._strip_left = pieces.rules.strip_start

    def prime(self, token_ids: Sequence[int]) -> None:
        if any(map(self._pieces.token_bytes, reversed(token_ids))):
            self._strip_left = 0
        tail = bytearray()
        for token_id in reversed(token_ids[-_UTF8_MAX:]):
            if not self._pieces.is_byte(token_id):
                break
            tail[:0] = self._pieces.token_bytes(token_id)
        self._run = tail[len(tail) - _incomplete_tail(tail) :]

    def append(self, token_id: int) -> str:
        is_byte, piece = self._pieces.is_byte(token_id), self._pieces.token_bytes(token_id)
        if is_byte:
            self._run += piece
        if is_byte is not False:  # an id that no token has does not end the run
            return ""
        return self._stripped(self._take_run() + piece.decode())

    def flush(self) -> str:
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        """`text` without what the decoder drops from the very start of the whole text."""
        while self._strip_left and text:
            if not text.startswith(self._pieces.rules.strip_char):
                self._strip_left = 0
                break
            text = text[len(self._pieces.rules.strip_char) :]
            self._strip_left -= 1
        return text


class _ContextStream:
    """Other decoders: decode a window of recent tokens with and without the new one; the difference is its text.

    The window begins at tokens that gave text already, so that nothing in it is taken for the start of a text.
    """

    def __init__(self, pieces: ContextPieces, added_tokens: dict[int, str]):
        self._pieces = pieces
        self._added_tokens = added_tokens
        self._after_added = False
        self._window: list[int] = []  # context, then held tokens
        self._num_context = 0
        self._context_text = ""
        self._retry_at = 1  # held tokens at which the next decode pays: bounds the work on text that never completes

    def prime(self, token_ids: Sequence[int]) -> None:
        self._window = list(token_ids[-_CONTEXT_TOKENS:])
        self._num_context = len(self._window)
        self._context_text = self._pieces.decode(self._window)

    def append(self, token_id: int) -> str:
        added, after_added = self._added_tokens.get(token_id), self._after_added
        self._after_added = added is not None
        self._window.append(token_id)
        held = len(self._window) - self._num_context
        if held < self._retry_at:
            return ""
        text = self._pieces.decode(self._window)
        if len(text) <= len(self._context_text) or (self._pieces.holds_bytes and text.endswith("\ufffd")):
            self._retry_at = held + max(1, held // 2)
            return ""
        new = self._advance(text)
        # No space between two special tokens where the request says so (vLLM's rule).
        return added if added is not None and after_added and held == 1 else new

    def flush(self) -> str:
        if len(self._window) == self._num_context:
            return ""
        return self._advance(self._pieces.decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._window = self._window[self._num_context :][-_CONTEXT_TOKENS:]
        self._num_context = len(self._window)
        self._context_text = self._pieces.decode(self._window)
        self._retry_at = 1
        return new


def _incomplete_tail(data: bytes | bytearray) -> int:
    """How many of the last bytes begin a UTF-8 character that they do not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(data))
    return len(decoder.getstate()[0])
