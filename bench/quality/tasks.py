"""Small tasks with one right answer: arithmetic, copying, and retrieval from two thousand tokens.

Each item is text, a question and the answer that must follow; it counts as solved where greedy decoding gives exactly
that, which one pass over question and answer tells. Quantized KV caches fail at retrieval first. The items come from a
fixed seed, so that two engines are asked the very same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from bench.quality.reading import Reader, log_softmax

_TEXT = """apple river candle stone garden window silver bridge forest lamp ocean paper violin copper meadow
tiger pillow engine harbor lemon castle feather mirror basket thunder island pepper blanket ladder rocket"""
_WORDS = _TEXT.split()
_FILLER = (
    "The morning was quiet and the road was empty.",
    "Somebody had left a chair in front of the door.",
    "It rained a little in the afternoon, and then it stopped.",
    "The shop on the corner sold paper, string and glue.",
    "Nobody remembered who had planted the old tree.",
    "A bus passed every hour, and it was seldom full.",
    "The letters were kept in a box under the stairs.",
)


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its one right answer (the text that must follow)."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Passage:
    """Items that share one text before them."""

    context: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What is scored as one: the items of one passage or several."""

    name: str
    passages: tuple[Passage, ...]


def arithmetic(count: int = 50) -> Task:
    """Sums of two numbers below fifty, after examples."""
    rng = random.Random(1)
    pairs = [(rng.randrange(2, 50), rng.randrange(2, 50)) for _ in range(count + 8)]
    context = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:8])
    items = tuple(Item(f"{a} + {b} =", f" {a + b}") for a, b in pairs[8:])
    return Task("arithmetic", (Passage(context, items),))


def copying(count: int = 50) -> Task:
    """Lists of words to repeat."""
    rng = random.Random(2)
    lists = [rng.sample(_WORDS, 8) for _ in range(count + 2)]
    context = "".join(f"List: {', '.join(words)}\nAgain: {', '.join(words)}\n\n" for words in lists[:2])
    items = [Item(f"List: {', '.join(words)}\nAgain:", f" {', '.join(words)}") for words in lists[2:]]
    return Task("copying", (Passage(context, tuple(items)),))


def retrieval(filler: int, count: int = 50, passages: int = 4) -> Task:
    """Facts strewn over a text with `filler` sentences between them; each question asks for one.

    Of several passages, so that two points are more than one item.
    """
    return Task("retrieval", tuple(_facts(filler, count, random.Random(3 + index)) for index in range(passages)))


def _facts(filler: int, count: int, rng: random.Random) -> Passage:
    names = [f"{first} {second}" for first in _WORDS for second in _WORDS if first != second]
    chosen = rng.sample(names, count)
    codes = [f"{rng.randrange(1000, 10000)}" for _ in chosen]
    sentences = []
    for index, (name, code) in enumerate(zip(chosen, codes, strict=True)):
        sentences.append(f"The code of the {name} is {code}.")
        sentences += [rng.choice(_FILLER) for _ in range(filler * (index + 1) // count - filler * index // count)]
    context = " ".join(sentences) + "\n\n"
    items = [Item(f"The code of the {name} is", f" {code}") for name, code in zip(chosen, codes, strict=True)]
    rng.shuffle(items)
    return Passage(context, tuple(items))


def fitting_tasks(reader: Reader, longest: int = 2000) -> list[Task]:
    """The tasks, retrieval as long as `longest` tokens and the engine's context allow."""
    room = min(longest, reader.manifest.limits.max_context_len - 64)
    tasks = []
    for task in (arithmetic(), copying()):
        (passage,) = task.passages
        widest = max(len(reader.encode(item.question + item.answer)) for item in passage.items)
        if len(reader.encode(passage.context)) + widest + 1 < reader.manifest.limits.max_context_len:
            tasks.append(task)

    def longest_passage(filler: int, count: int) -> int:
        return max(len(reader.encode(passage.context)) for passage in retrieval(filler, count).passages)

    count = 50
    while count and longest_passage(0, count) > room:
        count -= 5
    if count:
        filler = 0
        while longest_passage(filler + 5, count) <= room:
            filler += 5
        tasks.append(retrieval(filler, count))
    return tasks


def score(reader: Reader, task: Task) -> dict[str, float | int]:
    """`solved`: the share of items whose answer greedy decoding gives; `surprise`: nats an answer's token, mean.

    A passage's context is read once; each question is read after it and forgotten.
    """
    solved: list[bool] = []
    surprises: list[float] = []
    longest = 0
    for passage in task.passages:
        context = reader.prefix + reader.encode(passage.context)
        longest = max(longest, len(context))
        for _ in reader.chunks(context, logits_from=len(context)):
            pass
        for item in passage.items:
            question, whole = reader.encode(item.question), reader.encode(item.question + item.answer)
            # A tokenizer may join the question's end with the answer: what both share is the question.
            shared = next((i for i, (a, b) in enumerate(zip(question, whole, strict=False)) if a != b), len(question))
            rows = np.concatenate(
                [log_softmax(chunk) for chunk in reader.chunks(whole[:-1], len(context), logits_from=shared - 1)]
            )
            wanted = np.array(whole[shared:])
            solved.append(bool((rows.argmax(-1) == wanted).all()))
            surprises += (-rows[np.arange(len(wanted)), wanted]).tolist()
    return {
        "items": len(solved),
        "context_tokens": longest,
        "solved": sum(solved) / len(solved),
        "surprise": float(np.mean(surprises)),
    }
