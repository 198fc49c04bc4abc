"""The target writes dialogues: a full batch of its own engine from the first step to the last.

A dialogue whose question is complete goes on with its answer, and one whose answer is complete makes room for the next
question, so no row waits for the longest of its batch. The number of a dialogue and the seed decide its text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from builder.drafts.config import DraftTraining
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
    """A dialogue under way: what its running request has brought so far."""

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

    def take_hidden(self, sequence: Running, hidden: NDArray[np.float32]) -> None:
        name = sequence.request.message.request_id
        if name.startswith(_ANSWER):
            self.states.setdefault(name, []).append(hidden.astype(np.float16))

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
        self._core = EngineCore(self._executor, limits, draft_engine=self._reader)
        self._writing: dict[int, _Writing] = {}

    def __enter__(self) -> DialogueWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.close()

    def write(self, start: int) -> Iterator[list[Dialogue]]:
        """Without end, the dialogues from number `start` on, `batch_requests` of them at a time."""
        count, done, number = self._config.batch_requests, {}, start
        for _ in range(count):
            self._ask(number)
            number += 1
        while True:
            for delta in self._core.step().deltas:
                complete = self._take(delta)
                if complete is not None:
                    done[complete[0]] = complete[1]
                    self._ask(number)
                    number += 1
            while all(start + i in done for i in range(count)):
                yield [done.pop(start + i) for i in range(count)]
                start += count

    def _ask(self, number: int) -> None:
        self._request(
            number,
            _QUESTION,
            self._open_turn(),
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=self._config.max_question),
        )

    def _answer(self, number: int, question: str) -> None:
        """Two of three answers are greedy: those are what most users see."""
        top = self._config.top if self._config.kind == "model" else None
        self._request(
            number,
            _ANSWER,
            self._prompt_of(question),
            SamplingParams(
                temperature=0.8 if number % 3 == 2 else 0.0, max_tokens=self._config.max_answer, logprobs=top
            ),
        )

    def _request(self, number: int, kind: str, prompt: list[int], params: SamplingParams) -> None:
        params.seed, params.detokenize = (self._config.seed << 32) + number, False
        params.max_tokens = min(params.max_tokens or 1, self._most_tokens - len(prompt))
        self._writing[number] = _Writing(prompt)
        self._core.add_request(
            EngineRequest(
                request_id=f"{kind}{number}", prompt_token_ids=prompt, params=params, arrival_time=time.monotonic()
            )
        )

    def _take(self, delta: RequestDelta) -> tuple[int, Dialogue] | None:
        """What a step brought one request; a dialogue's number and itself where that completes it."""
        if delta.error is not None:
            raise PlancastError(f"the target could not write on: {delta.error}")
        kind, _, digits = delta.request_id.rpartition("-")
        number = int(digits)
        writing = self._writing[number]
        for part in delta.sequences:
            writing.token_ids += part.new_token_ids
            writing.logprobs += part.logprobs or []
        if not delta.finished:
            return None
        del self._writing[number]
        if kind + "-" == _QUESTION:
            question = self._tokenizer.decode(writing.token_ids, skip_special_tokens=True).strip()
            self._answer(number, question or "Hello!")
            return None
        states = self._reader.states.pop(delta.request_id) if self._reader is not None else None
        return number, _dialogue(writing, self._config, None if states is None else np.concatenate(states))

    def _open_turn(self) -> list[int]:
        """The ids of a conversation that ends where the user is about to speak; just BOS without a template."""
        if self._template is None:
            return self._tokenizer.encode("") or [0]
        return self._tokenizer.encode(self._chat(_MARK).split(_MARK)[0], add_special_tokens=False)

    def _prompt_of(self, question: str) -> list[int]:
        if self._template is None:
            return self._tokenizer.encode(question)
        return self._tokenizer.encode(self._chat(question), add_special_tokens=False)

    def _chat(self, question: str) -> str:
        assert self._template is not None
        return self._template.render([{"role": "user", "content": question}], add_generation_prompt=True)


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
