"""Structured output: JSON, regular expressions, choices and grammars, enforced token by token through `llguidance`.

`parse_structured_outputs` reads what a request asks for; `GrammarCompiler` turns it into a `Grammar`, one a sequence;
the sampler applies its mask to the logits. Masks are computed in a thread beside the model's step (`prefetch`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError
from runtime.sampling.params_check import short_repr
from runtime.tokenizer import Tokenizer, read_eos_token_ids

if TYPE_CHECKING:
    import llguidance

KINDS = ("json", "json_object", "regex", "choice", "grammar")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback")
# Between JSON tokens: one space at most, or one line break and its indentation. Without a bound a model may write
# whitespace for ever.
JSON_WHITESPACE = r"(\n[ \t]{0,32}|[ ]?)"
MAX_GRAMMAR_CHARS = 1 << 20
_CACHED_GRAMMARS = 64

# The limits that one byte of a token bitmask puts on eight logits: infinity where the bit is set, else minus infinity.
_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)


@dataclass(frozen=True)
class StructuredOutput:
    """A checked request: its kind (of `KINDS`), its text (JSON for json and choice), and JSON's whitespace pattern."""

    kind: str
    text: str
    whitespace: str | None = JSON_WHITESPACE  # None: none at all

    def grammar(self) -> str:
        """The grammar in llguidance's form. Raises `RequestError` where it cannot be read."""
        import llguidance

        try:
            if self.kind in ("json", "json_object"):
                overrides: Any = {"whitespace_flexible": self.whitespace is not None}
                if self.whitespace is not None:
                    overrides["whitespace_pattern"] = self.whitespace
                return llguidance.LLMatcher.grammar_from_json_schema(self.text, overrides=overrides)
            return llguidance.grammar_from(self.kind, self.text)  # type: ignore[arg-type]
        except ValueError as error:
            raise _refusal(self.kind, str(error)) from error


def parse_structured_outputs(value: object) -> StructuredOutput:
    """Read `SamplingParams.structured_outputs`: exactly one of `KINDS`, and `OPTIONS`. Raises `RequestError`."""
    if not isinstance(value, dict):
        raise RequestError(f"structured_outputs must be an object, got {short_repr(value)}", "structured_outputs")
    unknown = sorted(str(key) for key in value if key not in KINDS and key not in OPTIONS)
    if unknown:
        raise RequestError(
            f"structured_outputs has unknown keys: {', '.join(unknown)}. It takes one of {', '.join(KINDS)}, and the "
            f"options {', '.join(OPTIONS)}",
            "structured_outputs",
        )
    given = [kind for kind in KINDS if value.get(kind) is not None and value[kind] is not False]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs needs exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}",
            "structured_outputs",
        )
    kind = given[0]
    text = _text_of(kind, value[kind], closed=_flag(value, "disable_additional_properties"))
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"structured_outputs.{kind} is {len(text)} characters long; the limit is {MAX_GRAMMAR_CHARS}",
            f"structured_outputs.{kind}",
        )
    pattern = value.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError(
            f"structured_outputs.whitespace_pattern must be a regular expression, got {short_repr(pattern)}",
            "structured_outputs.whitespace_pattern",
        )
    whitespace = None if _flag(value, "disable_any_whitespace") else pattern or JSON_WHITESPACE
    return StructuredOutput(kind, text, whitespace)


def _text_of(kind: str, value: object, *, closed: bool) -> str:
    """The text of one kind's value, its shape checked."""
    param = f"structured_outputs.{kind}"
    if kind == "json_object":
        if value is not True:
            raise RequestError(f"{param} must be true, got {short_repr(value)}", param)
        return '{"type": "object"}'
    if kind == "json":
        try:
            return json.dumps(_schema(value, closed))
        except RecursionError as error:
            raise RequestError(f"{param} is nested too deeply", param) from error
    if kind == "choice":
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) and v for v in value):
            raise RequestError(
                f"{param} must be a list of one or more non-empty strings, got {short_repr(value)}", param
            )
        return json.dumps(list(value))
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{param} must be non-empty text, got {short_repr(value)}", param)
    return value


def _schema(value: object, closed: bool) -> object:
    param = "structured_outputs.json"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"{param} is no valid JSON: {error}", param) from error
    if not isinstance(value, (dict, bool)):
        raise RequestError(f"{param} must be a JSON schema (an object), got {short_repr(value)}", param)
    return _without_additional_properties(value) if closed else value


def _without_additional_properties(schema: Any) -> Any:
    """The schema with every object closed to properties that it does not name."""
    if isinstance(schema, list):
        return [_without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _without_additional_properties(item) for key, item in schema.items()}
    if "properties" in copy and not {"additionalProperties", "patternProperties"} & copy.keys():
        copy["additionalProperties"] = False
    return copy


class Grammar:
    """One sequence's place in its grammar. EOS is allowed where the text may end; after its end only EOS is."""

    def __init__(self, compiler: GrammarCompiler, matcher: Future[llguidance.LLMatcher] | llguidance.LLMatcher):
        self._compiler = compiler
        self._pending = matcher
        self._mask = np.empty(0, np.int32)  # one bit a token
        self._masked = False  # `_mask` is that of the present place
        self._mask_job: Future[None] | None = None
        self._tokens_after_end = 0

    @property
    def _matcher(self) -> llguidance.LLMatcher:
        if isinstance(self._pending, Future):
            self._pending = self._pending.result().deep_copy()
        return self._pending

    def append(self, token_id: int) -> None:
        """The token has joined the text. Where the grammar forbids it, or cannot follow it, `failure` says so."""
        self._settle()
        self._masked = False
        if self._tokens_after_end or token_id in self._compiler.eos_token_ids:
            self._tokens_after_end += 1
            return
        self._matcher.consume_token(token_id)  # a failure stays in the matcher, where the next mask finds it

    @property
    def failure(self) -> str | None:
        """Why the text cannot be followed any further, after which `apply` raises; None while it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def rewind(self, num_tokens: int) -> None:
        """The last `num_tokens` tokens have left the text."""
        self._settle()
        self._masked = False
        after_end = min(num_tokens, self._tokens_after_end)
        self._tokens_after_end -= after_end
        if num_tokens > after_end:
            self._matcher.rollback(num_tokens - after_end)

    def fork(self) -> Grammar:
        self._settle()
        copy = Grammar(self._compiler, self._matcher.deep_copy())
        copy._tokens_after_end = self._tokens_after_end
        return copy

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of the drafted `token_ids` may follow, in order; the sequence stays where it is."""
        self._settle()
        if self._tokens_after_end:
            return 0
        body = list(token_ids)
        ends = [i for i, token_id in enumerate(body) if token_id in self._compiler.eos_token_ids]
        allowed = self._matcher.validate_tokens(body[: ends[0]] if ends else body)
        if not ends or allowed < ends[0]:
            return allowed
        for token_id in body[:allowed]:
            self._matcher.consume_token(token_id)
        may_end = self._matcher.is_accepting()
        if allowed:
            self._matcher.rollback(allowed)
        return allowed + may_end

    @property
    def may_end(self) -> bool:
        """Whether the text is complete as it is."""
        self._settle()
        return self._tokens_after_end > 0 or self._matcher.is_accepting()

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Forbid, in place, each token of `logits` f32 [V] that the grammar forbids. Raises `RequestError` where the
        grammar has become too complex to follow."""
        self._settle()
        if self._tokens_after_end:
            eos = self._compiler.eos_array
            kept = logits[eos]
            logits.fill(-np.inf)
            logits[eos] = kept
            return
        self.compute_mask()
        limits = _LIMITS[self._mask.view(np.uint8)].reshape(-1)
        np.minimum(logits, limits[: logits.size], out=logits)

    def compute_mask(self) -> None:
        """Fill the mask of the present place. Runs in the compiler's thread (with the GIL released) or here."""
        if self._masked or self._tokens_after_end:
            return
        matcher = self._matcher
        if not self._mask.size:
            self._mask = np.empty(-(-self._compiler.tables().vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self.failure is not None:
            raise RequestError(f"the grammar cannot be followed further: {self.failure}")
        self._masked = True

    def _settle(self) -> None:
        """Wait for the thread."""
        job, self._mask_job = self._mask_job, None
        if job is not None:
            job.result()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. The vocabulary itself is read at the first use, in the thread (0.3 s)."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Iterable[int]):
        """`vocab_size`: the width of the engine's logits. `eos_token_ids`: all ids that end a text."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.eos_array = np.array(sorted(i for i in self.eos_token_ids if i < vocab_size), np.int64)
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._lock = Lock()
        self._tables: llguidance.LLTokenizer | None = None
        self._prototype = lru_cache(_CACHED_GRAMMARS)(self._start)

    @classmethod
    def from_folder(
        cls, folder: str | Path, vocab_size: int, eos_token_ids: Iterable[int] | None = None
    ) -> GrammarCompiler:
        """For an artifact's or a model's folder. `eos_token_ids`: where the core stops; else the folder's."""
        ids = read_eos_token_ids(folder) if eos_token_ids is None else eos_token_ids
        return cls(lambda: Tokenizer.load(folder), vocab_size, ids)

    def check(self, structured_outputs: object) -> None:
        """Compile and throw away: raises `RequestError` for what is malformed, unsupported or too complex."""
        self._prototype(parse_structured_outputs(structured_outputs)).result()

    def compile(self, structured_outputs: object) -> Grammar:
        """The grammar of one sequence. Compiling goes on in a thread; a failure shows at the first use, or in `check`.

        Raises `RequestError` where the request is malformed.
        """
        return Grammar(self, self._prototype(parse_structured_outputs(structured_outputs)))

    def prefetch(self, grammars: Sequence[Grammar]) -> None:
        """Compute the grammars' next masks in the thread."""
        jobs = [grammar for grammar in grammars if grammar._mask_job is None and not grammar._masked]
        for grammar in jobs:
            grammar._mask_job = self._thread.submit(grammar.compute_mask)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, wanted: StructuredOutput) -> Future[llguidance.LLMatcher]:
        return self._thread.submit(self._compile, wanted)

    def _compile(self, wanted: StructuredOutput) -> llguidance.LLMatcher:
        import llguidance

        tables = self.tables()
        matcher = llguidance.LLMatcher(tables, wanted.grammar(), log_level=0)
        if matcher.is_error():
            raise _refusal(wanted.kind, matcher.get_error())
        return matcher

    def tables(self) -> llguidance.LLTokenizer:
        """The vocabulary in llguidance's form. Raises `RequestError` where llguidance cannot use it."""
        import llguidance

        with self._lock:
            if self._tables is None:
                if not self.eos_token_ids:
                    raise RequestError("structured output needs a model with an EOS token; this one has none")
                tokenizer = self._load_tokenizer()
                width = max(self._vocab_size, tokenizer.vocab_size)
                try:
                    self._tables = llguidance.LLTokenizer(
                        tokenizer.to_json(), n_vocab=width, eos_token=sorted(self.eos_token_ids)
                    )
                except ValueError as error:
                    raise RequestError(
                        f"structured output is not available with this model's tokenizer: {_first_line(str(error))}",
                        "structured_outputs",
                    ) from error
            return self._tables


def _refusal(kind: str, reason: str) -> RequestError:
    param = f"structured_outputs.{kind}"
    return RequestError(f"{param} cannot be used: {_first_line(reason)}", param)


def _flag(value: dict, name: str) -> bool:
    flag = value.get(name)
    if flag is None:
        return False
    if not isinstance(flag, bool):
        raise RequestError(
            f"structured_outputs.{name} must be true or false, got {short_repr(flag)}", f"structured_outputs.{name}"
        )
    return flag


def _first_line(text: str) -> str:
    """llguidance's message without the parser's state, which follows on further lines."""
    lines = [line.strip() for line in text.split("<state>")[0].splitlines() if line.strip()]
    reason = " ".join(lines[:4]) or "no reason given"
    return reason if len(reason) <= 300 else reason[:297] + "..."
