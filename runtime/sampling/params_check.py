"""The check of `SamplingParams`: each field's type and range, then the conflicts between fields."""

from __future__ import annotations

import math

from runtime.errors import RequestError
from runtime.sampling_params import SamplingParams

MAX_SEQUENCES = 128
MAX_BEAM_WIDTH = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 100.0
# Log probabilities of one request, in entries (tokens x entries a token): 2^20 take about 100 MB of Python objects.
MAX_LOGPROB_ENTRIES = 1 << 20


class Verifier:
    """The checks of `SamplingParams.verify`, one method a kind."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, max_context_len: int, prompt_len: int | None, max_logprobs: int
    ):
        self.p = params
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.prompt_len = prompt_len
        self.max_logprobs = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)

    def run(self) -> None:
        self._flags()
        self._counts()
        self._sampling()
        self._stops()
        self._tokens()
        self._lengths()
        self._logprobs()
        self._beam()
        self._structured()

    def _flags(self) -> None:
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "early_stopping",
        ):
            value = getattr(self.p, name)
            if not isinstance(value, bool):
                raise _wrong(name, value, "true or false")

    def _counts(self) -> None:
        p = self.p
        _check_int("n", p.n, 1, MAX_SEQUENCES)
        if p.best_of is not None:
            _check_int("best_of", p.best_of, 1, MAX_SEQUENCES)
            if p.best_of < p.n:
                raise RequestError(f"best_of must be at least n, got best_of = {p.best_of} with n = {p.n}", "best_of")

    def _sampling(self) -> None:
        p = self.p
        _check_float("presence_penalty", p.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", p.repetition_penalty, 1e-3, 1e3)
        _check_float("temperature", p.temperature, 0.0, math.inf)
        _check_float("top_p", p.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", p.min_p, 0.0, 1.0)
        _check_float("typical_p", p.typical_p, 0.0, 1.0, above=True)
        _check_int("top_k", p.top_k, -1, None, note="0 and -1 mean all")
        if p.seed is not None:
            _check_int("seed", p.seed, -(2**63), 2**64 - 1)
        if p.is_greedy and p.beam_width == 0 and p.num_sequences > 1:
            name = "n" if p.n > 1 else "best_of"
            raise RequestError(
                f"{name} must be 1 with greedy sampling (temperature {p.temperature}), got {p.num_sequences}: "
                "the sequences would all be the same",
                name,
            )

    def _stops(self) -> None:
        p = self.p
        if p.stop is not None and not isinstance(p.stop, str):
            _check_list("stop", p.stop, str, "strings")
        if len(p.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(p.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
            )
        for text in p.stop_strings:
            if not text:
                raise RequestError("stop holds an empty string, which would end every output at once", "stop")
            if len(text) > MAX_STOP_STRING_LENGTH:
                raise RequestError(
                    f"a string of stop is {len(text)} characters long; the limit is {MAX_STOP_STRING_LENGTH}", "stop"
                )
        if p.stop_strings and not p.detokenize:
            raise RequestError("stop needs the text, so it cannot be used with detokenize = false", "stop")

    def _tokens(self) -> None:
        p = self.p
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(p, name)
            if ids is not None:
                _check_list(name, ids, int, "token ids")
                self._check_token_ids(name, ids)
        if p.allowed_token_ids is not None and not p.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: no token could be sampled", "allowed_token_ids")
        if p.bad_words is not None:
            _check_list("bad_words", p.bad_words, str, "strings")
            if len(p.bad_words) > MAX_BAD_WORDS:
                raise RequestError(f"bad_words has {len(p.bad_words)} words; the limit is {MAX_BAD_WORDS}", "bad_words")
            if not all(p.bad_words):
                raise RequestError("bad_words holds an empty string", "bad_words")
        if p.bad_words_token_ids is not None:
            _check_list("bad_words_token_ids", p.bad_words_token_ids, list, "lists of token ids")
            for word in p.bad_words_token_ids:
                if not word:
                    raise RequestError("bad_words_token_ids holds an empty list", "bad_words_token_ids")
                self._check_token_ids("bad_words_token_ids", word)
        if p.logit_bias is not None:
            if not isinstance(p.logit_bias, dict):
                raise _wrong("logit_bias", p.logit_bias, "a map from token ids to numbers")
            self._check_token_ids("logit_bias", p.logit_bias)
            for token_id, bias in p.logit_bias.items():
                _check_float(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, param="logit_bias")

    def _check_token_ids(self, name: str, ids) -> None:
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise _wrong(name, token_id, "token ids (whole numbers)")
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{name} holds the token id {token_id}; the vocabulary's ids run from 0 to {self.vocab_size - 1}",
                    name,
                )

    def _lengths(self) -> None:
        p = self.p
        if p.max_tokens is not None:
            _check_int("max_tokens", p.max_tokens, 1, None)
        _check_int("min_tokens", p.min_tokens, 0, None)
        if p.max_tokens is not None and p.min_tokens > p.max_tokens:
            raise RequestError(
                f"min_tokens must not exceed max_tokens, got min_tokens = {p.min_tokens} with "
                f"max_tokens = {p.max_tokens}",
                "min_tokens",
            )
        if p.truncate_prompt_tokens is not None:
            _check_int(
                "truncate_prompt_tokens",
                p.truncate_prompt_tokens,
                -1,
                self.max_context_len,
                note="-1 means as many as fit",
            )
            if p.truncate_prompt_tokens == 0:
                raise RequestError(
                    "truncate_prompt_tokens is 0, which would leave no prompt; give 1 or more, or -1",
                    "truncate_prompt_tokens",
                )
        if self.prompt_len is None:
            return
        if self.prompt_len < 1:
            raise RequestError("the prompt is empty: it must hold at least one token", "prompt")
        limit = self.max_context_len
        if self.prompt_len >= limit:
            raise RequestError(
                f"the prompt has {self.prompt_len} tokens; with at least one token of output it must fit into the "
                f"context of {limit} tokens. Shorten it, or set truncate_prompt_tokens",
                "prompt",
            )
        if p.max_tokens is not None and self.prompt_len + p.max_tokens > limit:
            raise RequestError(
                f"the prompt's {self.prompt_len} tokens and max_tokens = {p.max_tokens} make "
                f"{self.prompt_len + p.max_tokens}, more than the context of {limit} tokens. "
                f"Set max_tokens to {limit - self.prompt_len} or less",
                "max_tokens",
            )
        if self.prompt_len + p.min_tokens > limit:
            raise RequestError(
                f"the prompt's {self.prompt_len} tokens and min_tokens = {p.min_tokens} exceed the context of "
                f"{limit} tokens",
                "min_tokens",
            )

    def _logprobs(self) -> None:
        p = self.p
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(p, name)
            if count is None:
                continue
            _check_int(name, count, -1, None, note="-1 means the whole vocabulary")
            asked = self.vocab_size if count < 0 else count
            if asked > self.max_logprobs:
                what = f"{count} (the whole vocabulary of {asked})" if count < 0 else str(count)
                raise RequestError(f"{name} = {what} exceeds the limit max_logprobs = {self.max_logprobs}", name)
            self._check_entries(name, asked + 1)

    def _check_entries(self, name: str, per_token: int) -> None:
        """Refuse what could not be held: each entry is a Python object on its way to the client."""
        p = self.p
        if name == "prompt_logprobs":
            if self.prompt_len is None:
                return
            tokens, what = self.prompt_len, f"{self.prompt_len} prompt tokens"
        else:
            length = p.max_tokens if p.max_tokens is not None else self.max_context_len - (self.prompt_len or 0)
            tokens, what = length * p.num_sequences, f"{p.num_sequences} x {length} tokens of output"
        if tokens * per_token > MAX_LOGPROB_ENTRIES:
            raise RequestError(
                f"{name} = {getattr(p, name)} for {what} makes {tokens * per_token} entries; "
                f"the limit is {MAX_LOGPROB_ENTRIES}. Ask for fewer, or for a shorter text",
                name,
            )

    def _beam(self) -> None:
        p = self.p
        _check_int("beam_width", p.beam_width, 0, MAX_BEAM_WIDTH, note="0 means no beam search")
        _check_float("length_penalty", p.length_penalty, -100.0, 100.0)
        if p.beam_width == 0:
            return
        if p.beam_width < p.n:
            raise RequestError(
                f"beam_width must be at least n, got beam_width = {p.beam_width} with n = {p.n}", "beam_width"
            )
        defaults = SamplingParams()
        for name in ("top_p", "top_k", "min_p", "typical_p", "best_of", "logprobs", "stop", "structured_outputs"):
            if getattr(p, name) not in (getattr(defaults, name), None, []) and not (name == "top_k" and p.top_k == -1):
                raise RequestError(f"{name} cannot be used with beam search (beam_width = {p.beam_width})", name)
        if p.temperature not in (0.0, 1.0):
            raise RequestError(
                f"beam search does not sample: temperature must be 0 or 1 with beam_width = {p.beam_width}, "
                f"got {p.temperature}",
                "temperature",
            )

    def _structured(self) -> None:
        p = self.p
        if p.structured_outputs is not None:
            from runtime.structured import parse_structured_outputs

            parse_structured_outputs(p.structured_outputs)
        if p.speculation is not None and not isinstance(p.speculation, bool):
            raise _wrong("speculation", p.speculation, "true or false")
        if p.extra_args is not None and not isinstance(p.extra_args, dict):
            raise _wrong("extra_args", p.extra_args, "a map")


def _wrong(name: str, value: object, expected: str, param: str | None = None) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {short_repr(value)}", param or name)


def short_repr(value: object) -> str:
    """`repr`, cut to 80 characters: for error messages."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _check_int(name: str, value: object, low: int, high: int | None, note: str = "") -> None:
    note = f" ({note})" if note else ""
    expected = (
        f"a whole number of at least {low}{note}" if high is None else f"a whole number from {low} to {high}{note}"
    )
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _wrong(name, value, expected)


def _check_float(
    name: str, value: object, low: float, high: float, *, above: bool = False, param: str | None = None
) -> None:
    """`above`: `low` itself is excluded. NaN and infinities are never accepted."""
    start = f"above {low:g}" if above else f"at least {low:g}"
    expected = f"a finite number {start}" + ("" if math.isinf(high) else f" and at most {high:g}")
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        ok = math.isfinite(number) and (low < number if above else low <= number) and number <= high
    if not ok:
        raise _wrong(name, value, expected, param)


def _check_list(name: str, value: object, kind: type, what: str) -> None:
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(item, kind) or isinstance(item, bool) for item in value
    ):
        raise _wrong(name, value, f"a list of {what}")
