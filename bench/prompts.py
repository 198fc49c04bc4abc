"""Prompts for workloads: token ids of exact lengths, cut from a text so that they look like language."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources


def prompts_of_length(encode: Callable[[str], list[int]], lengths: list[int]) -> list[list[int]]:
    """One prompt a length (tokens), each from another place of the text that ships with the builder.

    `encode` maps a text to its token ids. The text repeats where it is too short. No two prompts begin alike, so that a
    prefix cache finds nothing: where there are more of them than tokens in the text, its first and last token lead
    them, once more each time that the places are used up.
    """
    text = encode(resources.files("builder").joinpath("parity_text.txt").read_text())
    whole = text * (2 + max(lengths, default=0) // len(text))
    prompts: list[list[int]] = []
    used: set[int] = set()
    lead: list[int] = []
    start = 0
    for length in lengths:
        if len(used) == len(text):
            used.clear()
            lead = [*lead, text[0], text[-1]]
        while start in used:
            start = (start + 1) % len(text)
        used.add(start)
        prompts.append((lead + whole[start : start + length])[:length])
        start = (start + max(1, length // 2 + 7)) % len(text)
    return prompts
