"""The nearest match, for errors about a name that does not exist."""

from __future__ import annotations

import difflib


def nearest(word: str, candidates: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no candidate is near or holds `word`."""
    lowered = word.lower()
    found = [candidate for candidate in candidates if len(word) > 2 and lowered in candidate.lower()][:3]
    if not found:
        by_lower = {candidate.lower(): candidate for candidate in candidates}
        found = [by_lower[match] for match in difflib.get_close_matches(lowered, list(by_lower), n=1, cutoff=0.5)]
    return f"; did you mean {' or '.join(repr(candidate) for candidate in found)}?" if found else ""
