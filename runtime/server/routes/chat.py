"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from time import time

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import CompletionOutput
from runtime.server import generation, logprobs, prompts, sampling, sse
from runtime.server.chat_output import Message, finish_reason
from runtime.server.conversation import Conversation, Wish, prepare
from runtime.server.docs import describe
from runtime.server.parsers.base import Content, Event, Reasoning, ToolArguments, ToolStart
from runtime.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    OutFunctionCall,
    OutMessage,
    OutToolCall,
    ToolCallDelta,
)
from runtime.server.protocol.sampling import Usage
from runtime.server.routes.common import accept, json_response, log_usage, stream_response, usage, usage_of
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState

router = APIRouter(tags=["OpenAI"])


@dataclass(slots=True)
class Chat:
    """A checked request under its id."""

    talk: Conversation
    body: ChatCompletionRequest
    echo: str  # the final message that the answer continues, where it was asked to repeat it
    id: str
    created: int

    def chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.talk.model.name, choices=choices)

    def logprobs(self, sequence: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return logprobs.chat_logprobs(sequence.token_ids, sequence.logprobs or [], self.body.top_logprobs or 0)


@router.post("/v1/chat/completions", **describe(body=ChatCompletionRequest, returns=ChatCompletion, streams=True))
async def create_chat_completion(request: Request) -> Response:
    """Answer a chat."""
    state, body = await accept(request, ChatCompletionRequest)
    chat = await check(state, body)
    if body.stream:
        return stream_response(request, events(request, chat))
    with state.admission.admit(chat.talk.params.num_sequences):
        (result,) = await unless_disconnected(request, generation.collect([chat.talk.stream()]))
    counted = usage_of([result])
    log_usage(request, counted)
    completion = ChatCompletion(
        id=chat.id,
        created=chat.created,
        model=chat.talk.model.name,
        choices=[whole_choice(chat, sequence) for sequence in result.outputs[: chat.talk.params.n]],
        usage=counted,
    )
    if body.prompt_logprobs is not None:
        completion.prompt_logprobs = logprobs.prompt_logprobs(result.prompt_logprobs)
    if body.return_token_ids:
        completion.prompt_token_ids = chat.talk.prompt_ids
    return json_response(completion)


async def check(state: ServerState, body: ChatCompletionRequest) -> Chat:
    """Refuse what cannot be served, with 400 or 404 and the field's name."""
    model = state.registry.get(body.model)
    if body.chat_template is not None:
        raise sampling.invalid("chat_template", "a template comes with the model; a request cannot bring its own")
    if body.top_logprobs is not None and not body.logprobs:
        raise sampling.invalid("top_logprobs", "needs `logprobs` to be true")
    sampling.check_limit("top_logprobs", body.top_logprobs or 0, state.config.limits.max_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise sampling.invalid("prompt_logprobs", "log probabilities of the prompt are not streamed")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise sampling.invalid("best_of", "cannot stream: the best sequences are known only at the end")
    continues = bool(body.continue_final_message)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    newer = body.max_completion_tokens is not None
    wish = Wish(
        route="chat",
        messages=prompts.plain_messages(body.messages),
        fields=body,
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structured=sampling.structured_outputs(body, body.response_format),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        best_of=body.best_of,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=kwargs,
    )
    talk = await prepare(state, model, wish)
    echo = wish.messages[-1]["content"] if body.echo and continues else ""
    return Chat(talk, body, echo, generation.new_id("chatcmpl-"), int(time()))


def whole_choice(chat: Chat, sequence: CompletionOutput) -> ChatChoice:
    parser, message = chat.talk.output.make_parser(), Message()
    message.add(parser.feed(sequence.text))
    message.add(parser.finish())
    calls = [
        OutToolCall(id=call.id, function=OutFunctionCall(name=call.name, arguments=call.arguments or "{}"))
        for call in message.calls
    ]
    show_reasoning = message.reasoning and chat.body.include_reasoning is not False
    content = chat.echo + message.content
    return ChatChoice(
        index=sequence.index,
        message=OutMessage(
            content=content if content or not calls else None,
            reasoning_content=message.reasoning if show_reasoning else UNSET,
            reasoning=message.reasoning if show_reasoning else UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=chat.logprobs(sequence),
        finish_reason=finish_reason(sequence.finish_reason, bool(calls), chat.body.tool_choice),
        stop_reason=sequence.stop_reason,
        token_ids=sequence.token_ids if chat.body.return_token_ids else UNSET,
    )


async def events(request: Request, chat: Chat) -> AsyncGenerator[bytes, None]:
    """The streamed answer: the role, a chunk a delta, the usage, `[DONE]`."""
    options = chat.body.stream_options
    every = bool(options and options.continuous_usage_stats)
    completion_tokens = cached = drafted = accepted = 0
    prompt_tokens = len(chat.talk.prompt_ids)
    choices: dict[int, ChoiceStream] = {}
    with chat.talk.state.admission.admit(chat.talk.params.num_sequences):
        async with aclosing(chat.talk.stream()) as deltas:
            async for output in deltas:
                cached = output.num_cached_tokens
                drafted, accepted = output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens
                completion_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
                counted = usage(prompt_tokens, completion_tokens, cached) if every else None
                chunks = []
                for sequence in output.outputs:
                    if (choice := choices.get(sequence.index)) is None:
                        choice = choices[sequence.index] = ChoiceStream(chat, sequence.index)
                        chunks.append(choice.opening(counted))
                    chunks.append(choice.chunk(sequence, counted))
                if any(chunks):
                    yield b"".join(chunks)
    counted = usage(prompt_tokens, completion_tokens, cached, drafted, accepted)
    log_usage(request, counted)
    if options and options.include_usage:
        last = chat.chunk([])
        last.usage = counted
        yield sse.data(last)
    yield sse.DONE


class ChoiceStream:
    """One choice's chunks. Text that needs no parsing is a template filled in."""

    def __init__(self, chat: Chat, index: int):
        self.chat = chat
        self.index = index
        self.parser = None if chat.talk.output.is_plain else chat.talk.output.make_parser()
        self.calls = 0
        body = chat.body
        self.only_text = self.parser is None and not body.logprobs and not body.return_token_ids
        self.template = sse.TextTemplate(
            chat.chunk([ChunkChoice(index=index, delta=Delta(content=sse.TextTemplate.slot))])
        )

    def opening(self, counted: Usage | None) -> bytes:
        """The first chunk: the role, and what the answer continues."""
        choice = ChunkChoice(index=self.index, delta=Delta(role="assistant", content=self.chat.echo))
        return self._event(choice, counted, self.chat.talk.prompt_ids if self.chat.body.return_token_ids else None)

    def chunk(self, sequence: CompletionOutput, counted: Usage | None) -> bytes:
        """The delta as one or more events; empty where there is nothing to tell yet."""
        finish = sequence.finish_reason
        if self.only_text and finish is None and counted is None:
            return self.template.fill(sequence.text) if sequence.text else b""
        deltas = self._deltas(sequence.text, finish is not None)
        said_more = self.chat.body.logprobs or self.chat.body.return_token_ids
        if not deltas and (finish is not None or (said_more and sequence.token_ids)):
            deltas = [Delta()]
        choices = [ChunkChoice(index=self.index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs = self.chat.logprobs(sequence)
            if self.chat.body.return_token_ids:
                choices[0].token_ids = sequence.token_ids
            if finish is not None:
                choices[-1].finish_reason = finish_reason(finish, self.calls > 0, self.chat.body.tool_choice)
                choices[-1].stop_reason = sequence.stop_reason
        return b"".join(self._event(choice, counted) for choice in choices)

    def _deltas(self, text: str, finished: bool) -> list[Delta]:
        if self.parser is None:
            return [Delta(content=text)] if text else []
        events = self.parser.feed(text)
        if finished:
            events += self.parser.finish()
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> Delta | None:
        match event:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                if self.chat.body.include_reasoning is False:
                    return None
                return Delta(reasoning_content=text, reasoning=text)
            case ToolStart(call_id, name):
                self.calls += 1
                call = FunctionDelta(name=name, arguments="")
                return Delta(
                    tool_calls=[ToolCallDelta(index=self.calls - 1, id=call_id, type="function", function=call)]
                )
            case ToolArguments(text):
                more = FunctionDelta(arguments=text)
                return Delta(tool_calls=[ToolCallDelta(index=self.calls - 1, function=more)])

    def _event(self, choice: ChunkChoice, counted: Usage | None, prompt_ids: list[int] | None = None) -> bytes:
        chunk = self.chat.chunk([choice])
        if prompt_ids is not None:
            chunk.prompt_token_ids = prompt_ids
        if counted is not None:
            chunk.usage = counted
        return sse.data(chunk)
