"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server import generation, logprobs, prompts, sampling, sse
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Kind
from runtime.server.generation import Work
from runtime.server.protocol.completions import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from runtime.server.protocol.sampling import Usage
from runtime.server.registry import ServedModel
from runtime.server.routes.common import accept, json_response, log_usage, stream_response, usage, usage_of
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState

router = APIRouter(tags=["OpenAI"])


@dataclass(slots=True)
class Prompt:
    """One prompt, its parameters, and its own text where the answer begins with it (`echo`)."""

    ids: list[int]
    params: SamplingParams
    echo: str | None


@dataclass(slots=True)
class Completion:
    """A checked request: everything that making the answer needs."""

    state: ServerState
    model: ServedModel
    body: CompletionRequest
    prompts: list[Prompt]
    id: str
    created: int

    @property
    def num_sequences(self) -> int:
        return sum(prompt.params.num_sequences for prompt in self.prompts)

    @property
    def silent(self) -> bool:
        """`max_tokens: 0`: only the prompt is scored. (The engine samples one token, which is dropped.)"""
        return self.body.max_tokens == 0

    def streams(self) -> list[AsyncGenerator[RequestOutput, None]]:
        body = self.body
        return [
            generation.stream(
                self.state,
                self.model,
                Work(prompt.ids, prompt.params, "completions", body.priority or 0, body.user, body.cache_salt),
            )
            for prompt in self.prompts
        ]

    def response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(id=self.id, created=self.created, model=self.model.name, choices=choices)


@router.post("/v1/completions", **describe(body=CompletionRequest, returns=CompletionResponse, streams=True))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    state, body = await accept(request, CompletionRequest)
    completion = await check(state, body)
    if body.stream:
        return stream_response(request, events(request, completion))
    with state.admission.admit(completion.num_sequences):
        results = await unless_disconnected(request, generation.collect(completion.streams()))
    response = completion.response(
        [
            choice
            for number, (prompt, result) in enumerate(zip(completion.prompts, results, strict=True))
            for choice in whole_choices(completion, number, prompt, result)
        ]
    )
    counted = usage_of(results)
    response.usage = usage(counted.prompt_tokens, 0) if completion.silent else counted
    log_usage(request, response.usage)
    return json_response(response)


async def check(state: ServerState, body: CompletionRequest) -> Completion:
    """Refuse what cannot be served, with 400 or 404 and the field's name."""
    model = state.registry.get(body.model)
    limits = state.config.limits
    if body.suffix is not None:
        message = "`suffix` is not supported: the models served here continue a text, they do not fill one in"
        raise ApiError(Kind.INVALID, message, param="suffix", code="unsupported_parameter")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise sampling.invalid("best_of", "cannot stream: the best sequences are known only at the end")
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise sampling.invalid("max_tokens", "0 makes sense only with `echo` or `prompt_logprobs`")
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        param = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
        raise sampling.invalid(param, "log probabilities of the prompt are not streamed")
    encoded = await prompts.encode_prompts(
        model, body.prompt, add_special_tokens=body.add_special_tokens, max_prompts=limits.max_prompts
    )
    structured = sampling.structured_outputs(body, body.response_format)
    ready = []
    for ids, text in encoded:
        ids = prompts.truncate(ids, body.truncate_prompt_tokens, model)
        asked = None if body.max_tokens is None else max(1, body.max_tokens)
        params = sampling.to_params(
            body,
            model,
            limits,
            max_tokens=sampling.fit_max_tokens(len(ids), asked, model.max_context_len),
            logprobs=body.logprobs,
            best_of=body.best_of,
            structured=structured,
        )
        echo = None
        if body.echo:
            echo = text if text is not None else model.engine.tokenizer.decode(ids, skip_special_tokens=False)
            if body.logprobs is not None and params.prompt_logprobs is None:
                params.prompt_logprobs = body.logprobs
        ready.append(Prompt(ids, params, echo))
    return Completion(state, model, body, ready, generation.new_id("cmpl-"), int(time()))


def whole_choices(completion: Completion, number: int, prompt: Prompt, result: RequestOutput) -> list[CompletionChoice]:
    """The n choices of one prompt."""
    body = completion.body
    choices = []
    for sequence in result.outputs[: prompt.params.n]:
        token_ids, text = ([], "") if completion.silent else (sequence.token_ids, sequence.text)
        choice = CompletionChoice(
            index=number * prompt.params.n + sequence.index,
            text=(prompt.echo or "") + text,
            finish_reason="length" if completion.silent else sequence.finish_reason,
            stop_reason=None if completion.silent else sequence.stop_reason,
        )
        if body.logprobs is not None:
            positions = [] if completion.silent else sequence.logprobs or []
            shown = positions
            if prompt.echo is not None:
                token_ids = [*prompt.ids, *token_ids]
                shown = [*(result.prompt_logprobs or []), *positions]
            first = partial(completion.model.engine.tokenizer.decode, skip_special_tokens=False)
            choice.logprobs = logprobs.completion_logprobs(token_ids, shown, body.logprobs, 0, first)
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = logprobs.prompt_logprobs(result.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = [] if completion.silent else sequence.token_ids
            choice.prompt_token_ids = prompt.ids
        choices.append(choice)
    return choices


async def events(request: Request, completion: Completion) -> AsyncGenerator[bytes, None]:
    """The streamed answer: a chunk a delta, then the usage, then `[DONE]`."""
    body, state = completion.body, completion.state
    options = body.stream_options
    every = bool(options and options.continuous_usage_stats)
    counts = Counts(completion)
    choices: dict[int, ChoiceStream] = {}
    with state.admission.admit(completion.num_sequences):
        async with aclosing(generation.merged(completion.streams())) as deltas:
            async for number, output in deltas:
                prompt = completion.prompts[number]
                counts.add(number, output)
                chunks = []
                for sequence in output.outputs:
                    index = number * prompt.params.n + sequence.index
                    if (choice := choices.get(index)) is None:
                        choice = choices[index] = ChoiceStream(completion, prompt, index)
                    chunk = choice.chunk(sequence, counts if every else None)
                    if chunk:
                        chunks.append(chunk)
                if chunks:
                    yield b"".join(chunks)
    if options and options.include_usage:
        last = completion.response([])
        last.usage = counts.usage()
        yield sse.data(last)
    log_usage(request, counts.usage())
    yield sse.DONE


class Counts:
    """Token counts of a stream so far."""

    def __init__(self, completion: Completion):
        self.silent = completion.silent
        self.prompt_tokens = sum(len(prompt.ids) for prompt in completion.prompts)
        self.completion_tokens = 0
        self.metrics: dict[int, RequestMetrics] = {}  # of each prompt

    def add(self, number: int, output: RequestOutput) -> None:
        self.metrics[number] = output.metrics
        if not self.silent:
            self.completion_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)

    def usage(self) -> Usage:
        each = self.metrics.values()
        return usage(
            self.prompt_tokens,
            self.completion_tokens,
            sum(metrics.num_cached_tokens for metrics in each),
            sum(metrics.num_draft_tokens for metrics in each),
            sum(metrics.num_accepted_tokens for metrics in each),
        )


class ChoiceStream:
    """One choice's chunks. A chunk of nothing but text is a template filled in."""

    def __init__(self, completion: Completion, prompt: Prompt, index: int):
        self.completion = completion
        self.index = index
        self.prompt = prompt
        self.echo = prompt.echo
        self.offset = 0
        self.told_prompt = False  # with `return_token_ids` its ids come in the first chunk
        self.template = sse.TextTemplate(
            completion.response([CompletionChoice(index=index, text=sse.TextTemplate.slot)])
        )

    def chunk(self, sequence: CompletionOutput, counts: Counts | None) -> bytes:
        """The delta as an event; empty where there is nothing to tell yet."""
        body = self.completion.body
        text, token_ids, finish = sequence.text, sequence.token_ids, sequence.finish_reason
        if self.completion.silent:
            text, token_ids = "", []
            finish = finish and "length"
        if self.echo is not None:
            text, self.echo = self.echo + text, None
        plain = finish is None and body.logprobs is None and not body.return_token_ids and counts is None
        if plain:
            return self.template.fill(text) if text else b""
        choice = CompletionChoice(
            index=self.index, text=text, finish_reason=finish, stop_reason=sequence.stop_reason if finish else None
        )
        if body.logprobs is not None:
            positions = sequence.logprobs or []
            choice.logprobs = logprobs.completion_logprobs(token_ids, positions, body.logprobs, self.offset)
            self.offset += len(text)
        if body.return_token_ids:
            choice.token_ids = token_ids
            if not self.told_prompt:
                choice.prompt_token_ids, self.told_prompt = self.prompt.ids, True
        chunk = self.completion.response([choice])
        if counts is not None:
            chunk.usage = counts.usage()
        return sse.data(chunk)
