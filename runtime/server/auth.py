"""API keys: several, from the command line, a file or the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers

from runtime.errors import PlancastError

ENV_KEYS = "PLANCAST_API_KEY"
ENV_ADMIN_KEYS = "PLANCAST_ADMIN_KEY"


class ApiKeys:
    """A set of keys. Empty: everybody is let in (for user keys) or nobody (for admin keys): the caller decides."""

    def __init__(self, keys: Iterable[str]):
        # Digests have one length, so the time tells nothing of a key's length either.
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: str) -> bool:
        """Whether `key` is one of them. Always compares with every key."""
        given = _digest(key)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found


def key_of(headers: Headers) -> str:
    """The key that a request carries: `Authorization: Bearer KEY`, or Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "")


def load_keys(given: Iterable[str], file: Path | None, environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Keys from the command line, a file (one a line, `#` comments) and an environment variable (comma-separated).

    Raises `PlancastError` where the file cannot be read or holds no key, or a key is empty.
    """
    keys = [*given, *(key for key in environ.get(variable, "").split(",") if key.strip())]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PlancastError(f"cannot read the key file {file}: {error}") from None
        in_file = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not in_file:
            raise PlancastError(f"the key file {file} holds no key (one a line)")
        keys += in_file
    keys = [key.strip() for key in keys]
    if "" in keys:
        raise PlancastError("an API key is empty: that would let in every caller who sends none")
    return tuple(dict.fromkeys(keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
