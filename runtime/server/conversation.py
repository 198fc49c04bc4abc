"""A chat made ready for the engine, whichever protocol it came in: prompt, sampling, and how to read the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server import generation, prompts, sampling
from runtime.server.chat_output import OutputFormat, ToolChoice, output_format
from runtime.server.generation import Work
from runtime.server.protocol.chat import Tool
from runtime.server.protocol.sampling import SamplingFields
from runtime.server.registry import ServedModel
from runtime.server.state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a protocol makes of its own request. `*_param` are the names that its errors speak of."""

    route: str
    messages: list[dict[str, Any]]
    fields: SamplingFields
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    structured: dict[str, Any] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked chat."""

    state: ServerState
    model: ServedModel
    prompt_ids: list[int]
    params: SamplingParams
    output: OutputFormat
    work: Work

    def stream(self) -> AsyncGenerator[RequestOutput, None]:
        return generation.stream(self.state, self.model, self.work)


async def prepare(state: ServerState, model: ServedModel, wish: Wish) -> Conversation:
    """Render, tokenize and check. Raises `ApiError` or `RequestError` (400) that names the field."""
    text, ids = await prompts.render_chat(
        model,
        wish.messages,
        tools=wish.tools if wish.tool_choice != "none" else None,
        add_generation_prompt=wish.add_generation_prompt,
        continue_final_message=wish.continue_final_message,
        add_special_tokens=wish.add_special_tokens,
        kwargs=wish.template_kwargs,
    )
    ids = prompts.truncate(ids, wish.fields.truncate_prompt_tokens, model)
    output = output_format(
        model,
        state.config,
        tools=wish.tools,
        tool_choice=wish.tool_choice,
        parallel=wish.parallel_tool_calls,
        prompt=text,
    )
    if wish.structured is not None and output.structured is not None:
        raise sampling.invalid("tool_choice", "cannot force a tool call while another constraint binds the output")
    room = model.max_context_len
    params = sampling.to_params(
        wish.fields,
        model,
        state.config.limits,
        max_tokens=sampling.fit_max_tokens(len(ids), wish.max_tokens, room, wish.max_tokens_param, "messages"),
        logprobs=wish.logprobs,
        best_of=wish.best_of,
        structured=wish.structured or output.structured,
    )
    if output.keep_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    fields = wish.fields
    work = Work(ids, params, wish.route, fields.priority or 0, fields.user, fields.cache_salt)
    return Conversation(state, model, ids, params, output, work)
