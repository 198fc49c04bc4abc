"""The target writes dialogues: a full batch of its own engine from the first step to the last.

A dialogue whose question is complete goes on with its answer, and one whose answer is complete makes room for the next
question, so no row waits for the longest of its batch. The number of a dialogue and the seed decide its text.

Left to itself a target asks for few kinds of things, and for things that there are not. So three dialogues of four
begin with an everyday question (`builder.drafts.questions`), every eighth with an opening that the target completes
(`openings.txt`: the first words that questions have), and every fourth goes on with a second question about the first
answer. An answer that has come to go round in circles ends there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from builder.drafts.config import DraftTraining
from builder.drafts.questions import everyday_questions
from builder.drafts.repetition import goes_round
from runtime.artifact import Artifact
from runtime.chat_template import ChatTemplate
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.errors import PlancastError
from runtime.executors import open_executor
from runtime.messages import EngineRequest, RequestDelta, TokenLogprobs
from runtime.sampling_params import SamplingParams
from runtime.speculation.config import SpeculationConfig
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.sequence import Sequence as Running
    from runtime.speculation.proposer import Draft

_MARK = "\u2063plancast\u2063"
_QUESTION, _ANSWER = "question-", "answer-"
_OWN_EVERY, _GOES_ON_EVERY = 4, 4  # dialogues
_LOOKED_AT_EVERY = 16  # tokens of an answer


@dataclass(slots=True)
class Dialogue:
    """One sequence: the target's prompt and answer.

    `token_ids` i32 [T]; `first` is the position of the first token that the target wrote as an answer. `top_ids` i32
    [T - first, K] and `top_p` f16 [T - first, K]: what it gave the likeliest tokens at each of these positions; K is 0
    for a head. `hidden` f16 [T - first, H]: the last hidden states that they were read off, where the engine gives
    them.
    """

    token_ids: NDArray[np.int32]
    first: int
    top_ids: NDArray[np.int32]
    top_p: NDArray[np.float16]
    hidden: NDArray[np.float16] | None = None


@dataclass(slots=True)
class _Writing:
    """A dialogue under way: the turns before its running request, and what that has brought so far."""

    turns: list[dict[str, str]]
    opening: str  # of the question under way
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _Reader:
    """Keeps the target's hidden states of answers, and drafts nothing."""

    name = "eagle"
    is_free = False

    def __init__(self) -> None:
        self.states: dict[str, list[NDArray[np.float16]]] = {}

    def propose(self, wanted: Sequence[tuple[Running, int]]) -> list[Draft | None]:
        return [None] * len(wanted)

    def take_hidden(
        self, hidden: NDArray[np.float32], sequences: Sequence[Running], rows: Sequence[int], counts: Sequence[int]
    ) -> None:
        for sequence, row, count in zip(sequences, rows, counts, strict=True):
            name = sequence.request.message.request_id
            if name.startswith(_ANSWER):
                self.states.setdefault(name, []).append(hidden[row : row + count].astype(np.float16))

    def release(self, sequence: Running, *, complete: bool) -> None: ...


class DialogueWriter:
    """Writes with the engine in `artifact`; a context manager.

    Raises `PlancastError`: the engine does not load.
    """

    def __init__(self, artifact: Path, config: DraftTraining, num_threads: int | None = None):
        opened = Artifact.open(artifact)
        self._config = config
        self._tokenizer = Tokenizer.load(opened.path)
        self._template = ChatTemplate.load(opened.path, self._tokenizer)
        self._executor = open_executor(opened, num_threads=num_threads)
        self._reader = _Reader() if config.kind == "head" and opened.manifest.draft_head is not None else None
        limits = EngineConfig.from_manifest(
            opened.manifest,
            max_num_seqs=min(config.batch_requests, opened.manifest.limits.max_num_seqs),
            speculation=SpeculationConfig(method=("eagle",) if self._reader is not None else ()),
        )
        self._most_tokens = limits.max_context_len
        self._questions = everyday_questions(config.seed)
        self._openings = resources.files("builder.drafts").joinpath("openings.txt").read_text().splitlines()
        self._core = EngineCore(self._executor, limits, draft_engine=self._reader)
        self._writing: dict[int, _Writing] = {}

    def __enter__(self) -> DialogueWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.close()

    def write(self, start: int) -> Iterator[list[Dialogue]]:
        """Without end, the answers of the dialogues from number `start` on, `batch_requests` dialogues at a time."""
        count, number = self._config.batch_requests, start
        answers: dict[int, list[Dialogue]] = {}
        complete: set[int] = set()
        for _ in range(count):
            self._ask(number, [])
            number += 1
        while True:
            for delta in self._core.step().deltas:
                ended, answer = self._take(delta)
                if answer is None:
                    continue
                answers.setdefault(ended, []).append(answer)
                if ended not in self._writing:
                    complete.add(ended)
                    self._ask(number, [])
                    number += 1
            while all(start + i in complete for i in range(count)):
                complete.difference_update(range(start, start + count))
                yield [answer for i in range(count) for answer in answers.pop(start + i)]
                start += count

    def _ask(self, number: int, turns: list[dict[str, str]]) -> None:
        opening = ""
        if not turns and number % _OWN_EVERY:
            question = self._questions[(number - 1 - number // _OWN_EVERY) % len(self._questions)]
            self._answer(number, [{"role": "user", "content": question}])
            return
        if not turns and number % (2 * _OWN_EVERY):
            opening = str(np.random.default_rng((self._config.seed, number)).choice(self._openings))
        self._request(
            number,
            _QUESTION,
            _Writing(turns, opening, self._open_turn(turns, opening)),
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=self._config.max_question),
        )

    def _answer(self, number: int, turns: list[dict[str, str]]) -> None:
        """Two of three answers are greedy: those are what most users see."""
        top = self._config.top if self._config.kind == "model" else None
        self._request(
            number,
            _ANSWER,
            _Writing(turns, "", self._prompt_of(turns)),
            SamplingParams(
                temperature=0.8 if number % 3 == 2 else 0.0, max_tokens=self._config.max_answer, logprobs=top
            ),
        )

    def _request(self, number: int, kind: str, writing: _Writing, params: SamplingParams) -> None:
        # Another stream for each turn: the same random numbers would ask the same thing again.
        params.seed, params.detokenize = (self._config.seed << 32) + (len(writing.turns) << 28) + number, False
        params.max_tokens = min(params.max_tokens or 1, self._most_tokens - len(writing.prompt))
        self._writing[number] = writing
        self._core.add_request(
            EngineRequest(
                request_id=f"{kind}{number}",
                prompt_token_ids=writing.prompt,
                params=params,
                arrival_time=time.monotonic(),
            )
        )

    def _take(self, delta: RequestDelta) -> tuple[int, Dialogue | None]:
        """What a step brought one request: the number of its dialogue, and the answer that it completes, if it does.
        The dialogue is in `_writing` for as long as it goes on."""
        if delta.error is not None:
            raise PlancastError(f"the target could not write on: {delta.error}")
        kind, _, digits = delta.request_id.rpartition("-")
        number = int(digits)
        writing = self._writing[number]
        for part in delta.sequences:
            writing.token_ids += part.new_token_ids
            writing.logprobs += part.logprobs or []
        if not delta.finished:
            if kind + "-" == _QUESTION or not self._in_circles(writing):
                return number, None
            self._core.abort([delta.request_id])
        del self._writing[number]
        text = self._tokenizer.decode(writing.token_ids, skip_special_tokens=True)
        if kind + "-" == _QUESTION:
            question = (writing.opening + text).strip()
            self._answer(number, [*writing.turns, {"role": "user", "content": question or "Hello!"}])
            return number, None
        states = self._reader.states.pop(delta.request_id) if self._reader is not None else None
        answer = _dialogue(writing, self._config, None if states is None else np.concatenate(states))
        turns = [*writing.turns, {"role": "assistant", "content": text.strip()}]
        if self._goes_on(number, turns):
            self._ask(number, turns)
        return number, answer

    def _in_circles(self, writing: _Writing) -> bool:
        if len(writing.token_ids) % _LOOKED_AT_EVERY:
            return False
        return goes_round(np.array([*writing.prompt, *writing.token_ids], np.int32))

    def _goes_on(self, number: int, turns: list[dict[str, str]]) -> bool:
        """Whether a dialogue gets a second question: now and then, where there is a template and room for both."""
        if self._template is None or len(turns) > 2 or number % _GOES_ON_EVERY != _GOES_ON_EVERY - 1:
            return False
        room = self._config.max_question + self._config.max_answer
        return bool(turns[-1]["content"]) and len(self._open_turn(turns, "")) + room < self._most_tokens

    def _open_turn(self, turns: list[dict[str, str]], opening: str) -> list[int]:
        """The ids of a conversation that ends where the user has said `opening`; BOS and that without a template."""
        if self._template is None:
            return self._tokenizer.encode(opening) or [0]
        chat = self._chat([*turns, {"role": "user", "content": _MARK}])
        return self._tokenizer.encode(chat.split(_MARK)[0] + opening, add_special_tokens=False)

    def _prompt_of(self, turns: list[dict[str, str]]) -> list[int]:
        if self._template is None:
            return self._tokenizer.encode(turns[-1]["content"])
        return self._tokenizer.encode(self._chat(turns), add_special_tokens=False)

    def _chat(self, turns: list[dict[str, str]]) -> str:
        assert self._template is not None
        return self._template.render(turns, add_generation_prompt=True)


def _dialogue(writing: _Writing, config: DraftTraining, hidden: NDArray[np.float16] | None) -> Dialogue:
    top = config.top if config.kind == "model" else 0
    top_ids = np.zeros((len(writing.token_ids), top), np.int32)
    top_p = np.zeros((len(writing.token_ids), top), np.float16)
    for position, entry in enumerate(writing.logprobs if top else ()):
        # The sampled token stands first, and again among the top ones.
        likeliest = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        ranked = sorted(likeliest.items(), key=lambda item: -item[1])[:top]
        top_ids[position, : len(ranked)] = [token_id for token_id, _ in ranked]
        top_p[position, : len(ranked)] = np.exp([logprob for _, logprob in ranked])
    token_ids = np.array([*writing.prompt, *writing.token_ids], np.int32)
    return Dialogue(token_ids, len(writing.prompt), top_ids, top_p, hidden)
