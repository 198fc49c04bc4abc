"""Prompts for workloads: token ids of exact lengths, cut from a text so that they look like language."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources


def prompts_of_length(encode: Callable[[str], list[int]], lengths: list[int]) -> list[list[int]]:
    """One prompt a length (tokens), each from another place of the text that ships with the builder.

    `encode` maps a text to its token ids. The text repeats where it is too short.
    """
    ids = encode(resources.files("builder").joinpath("parity_text.txt").read_text())
    prompts = []
    start = 0
    for length in lengths:
        while start + length > len(ids):
            ids = ids + ids
        prompts.append(ids[start : start + length])
        start += max(1, length // 2 + 7)
    return prompts
