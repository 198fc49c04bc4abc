"""From what a client sends (texts, token ids, messages) to the token ids of a prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.errors import RequestError
from runtime.server.errors import ApiError, Kind
from runtime.server.protocol.chat import ChatMessage, ContentPart, Tool
from runtime.server.registry import ServedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

# Longer texts are tokenized (and longer templates rendered) in a thread: the event loop must not stand still.
_THREAD_FROM_CHARS = 8192
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


async def encode_text(model: ServedModel, text: str, *, add_special_tokens: bool = True, param: str) -> list[int]:
    """Token ids of `text`, in a thread where it is long. Raises 400 where the text is not valid Unicode."""
    encode = model.engine.tokenizer.encode
    try:
        if len(text) > _THREAD_FROM_CHARS:
            return await asyncio.to_thread(encode, text, add_special_tokens)
        return encode(text, add_special_tokens)
    except RequestError as error:
        raise ApiError(Kind.INVALID, f"`{param}`: {error}", param=param, code="invalid_value") from None


def check_ids(model: ServedModel, ids: Sequence[int], param: str) -> list[int]:
    """`ids`, all in the vocabulary. Raises 400 that names the first that is not."""
    size = model.engine.manifest.model.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        position, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < size)
        message = f"`{param}`: token id {token} at position {position} is outside the vocabulary of {size}"
        raise ApiError(Kind.INVALID, message, param=param, code="invalid_value")
    return list(ids)


def truncate(ids: list[int], limit: int | None, model: ServedModel) -> list[int]:
    """The last `limit` ids, as `truncate_prompt_tokens` says it (-1: what fits, with one left for the answer)."""
    if limit is None:
        return ids
    keep = model.max_context_len - 1 if limit == -1 else limit
    return ids[-keep:] if keep else []


async def encode_prompts(
    model: ServedModel, prompt: Any, *, add_special_tokens: bool | None, max_prompts: int, param: str = "prompt"
) -> list[tuple[list[int], str | None]]:
    """Every prompt in the field `param` of a request: its ids, and its text where it came as text.

    Raises 400 for no prompt, an empty one, more than `max_prompts`, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        items = [prompt]
    else:
        items = list(prompt)
    if not items:
        raise ApiError(Kind.INVALID, f"`{param}` is empty: give a text or token ids", param=param)
    if len(items) > max_prompts:
        message = f"`{param}` holds {len(items)} prompts; this server takes at most {max_prompts} in one request"
        raise ApiError(Kind.INVALID, message, param=param)
    encoded: list[tuple[list[int], str | None]] = []
    for number, item in enumerate(items):
        at = param if len(items) == 1 else f"{param}[{number}]"
        if isinstance(item, int):
            message = f"`{param}` mixes token ids with texts or lists: give one list of ids, or a list of lists"
            raise ApiError(Kind.INVALID, message, param=at)
        if isinstance(item, str):
            special = True if add_special_tokens is None else add_special_tokens
            ids, text = await encode_text(model, item, add_special_tokens=special, param=at), item
        else:
            ids, text = check_ids(model, item, at), None
        if not ids:
            raise ApiError(Kind.INVALID, f"`{at}` is empty: an engine needs at least one token", param=at)
        encoded.append((ids, text))
    return encoded


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them: text contents as strings, tool arguments as objects. Raises 400 by field."""
    plain = []
    for number, message in enumerate(messages):
        at = f"messages[{number}]"
        item: dict[str, Any] = {"role": message.role, "content": _text_of(message.content, f"{at}.content")}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                item[name] = value
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            item["reasoning_content"] = reasoning
        if message.tool_calls:
            item["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments, f"{at}.tool_calls[{index}]"),
                    },
                }
                for index, call in enumerate(message.tool_calls)
            ]
        plain.append(item)
    return plain


def _text_of(content: str | list[ContentPart] | None, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = part.text if part.type in _TEXT_PARTS else part.refusal if part.type == "refusal" else None
        if text is None:
            param = f"{at}[{number}]"
            reason = (
                "has no text" if part.type in _TEXT_PARTS else f"is of type {part.type!r}; this model reads only text"
            )
            raise ApiError(Kind.INVALID, f"`{param}` {reason}", param=param, code="invalid_value")
        texts.append(text)
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any], at: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        param = f"{at}.function.arguments"
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ApiError(Kind.INVALID, f"`{param}` is not valid JSON: {error}", param=param) from None
        if not isinstance(arguments, dict):
            raise ApiError(Kind.INVALID, f"`{param}` must be a JSON object", param=param)
    return arguments


async def render_chat(
    model: ServedModel,
    messages: list[dict[str, Any]],
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """The text that the model's template makes of a chat, and its token ids (the template writes BOS itself).

    Raises 400 for a template's own complaint, and for settings that exclude each other.
    """
    template = model.engine.chat_template
    if template is None:
        message = f"the model {model.name!r} has no chat template: use /v1/completions"
        raise ApiError(Kind.INVALID, message, param="messages", code="no_chat_template")
    specs = [msgspec.to_builtins(tool) for tool in tools] if tools else None
    reserved = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"} & set(kwargs or {})
    if reserved:
        param = f"chat_template_kwargs.{min(reserved)}"
        raise ApiError(Kind.INVALID, f"`{param}` is set by the server and cannot be given here", param=param)

    def render() -> str:
        return template.render(
            messages,
            tools=specs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(kwargs or {}),
        )

    size = sum(len(message["content"]) for message in messages)
    try:
        text = await asyncio.to_thread(render) if size > _THREAD_FROM_CHARS else render()
    except RequestError as error:
        raise ApiError(Kind.INVALID, str(error), param=error.param or "messages", code="template_error") from None
    return text, await encode_text(model, text, add_special_tokens=add_special_tokens, param="messages")
