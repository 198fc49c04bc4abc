"""Prompts of workloads: exact lengths, language, and none that a prefix cache knows from another."""

from __future__ import annotations

from bench.prompts import prompts_of_length


def encode(text: str) -> list[int]:
    """A token a word."""
    words = text.split()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return [vocabulary[word] for word in words]


def test_lengths_are_exact_also_past_the_end_of_the_text():
    lengths = [1, 7, 128, 9000, 3]
    assert [len(prompt) for prompt in prompts_of_length(encode, lengths)] == lengths


def test_no_two_prompts_share_a_first_block():
    """A step that divides the text's length came round early: 104 // 2 + 7 divides that of these 2,242 words."""
    for length in (64, 104, 128, 512):
        prompts = prompts_of_length(encode, [length] * 1500)
        assert len({tuple(prompt[:32]) for prompt in prompts}) == 1500


def test_more_prompts_than_places_still_differ():
    prompts = prompts_of_length(encode, [64] * 5000)
    assert len({tuple(prompt) for prompt in prompts}) == 5000
