"""Makes one response: runs its chat, fills in its items, and publishes each step as an event."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from runtime.outputs import CompletionOutput
from runtime.server import sse
from runtime.server.conversation import Conversation
from runtime.server.errors import to_api_error
from runtime.server.generation import new_id
from runtime.server.parsers.base import Content, Event, Reasoning, ToolArguments, ToolStart
from runtime.server.protocol.responses import (
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponsesUsage,
)
from runtime.server.responses_store import Stored

TextItem = TypeVar("TextItem", MessageItem, ReasoningItem)


class ResponseRun:
    """One run. Events are numbered as OpenAI numbers them."""

    def __init__(self, stored: Stored, talk: Conversation):
        self.stored = stored
        self.response = stored.response
        self.talk = talk
        self.item: OutputItem | None = None  # the one being written
        self.sequence_number = 0

    async def run(self) -> None:
        """To the end, whichever it is. Cancelling it makes the response `cancelled` and frees its blocks."""
        self._state("response.created")
        try:
            with self.talk.state.admission.admit(1):
                self.response.status = "in_progress"
                self._state("response.in_progress")
                await self._generate()
        except asyncio.CancelledError:
            self._end_item("incomplete")
            self.response.status = "cancelled"
            self._state("response.cancelled")
            raise
        except Exception as error:
            failure = self.stored.failure = to_api_error(error)
            self._end_item("incomplete")
            self.response.status = "failed"
            self.response.error = ResponseError(code=failure.code or failure.kind.value[1], message=failure.message)
            self._state("response.failed")
        finally:
            self.stored.wake()

    async def _generate(self) -> None:
        parser = self.talk.output.make_parser()
        output_tokens = cached = reasoning_tokens = 0
        last: CompletionOutput | None = None
        async with aclosing(self.talk.stream()) as deltas:
            async for output in deltas:
                cached = output.num_cached_tokens
                for last in output.outputs:
                    output_tokens += len(last.token_ids)
                    for event in parser.feed(last.text):
                        self._take(event)
                    if isinstance(self.item, ReasoningItem):
                        reasoning_tokens += len(last.token_ids)
        for event in parser.finish():
            self._take(event)
        if not self.response.output:
            self._take(Content(""))
        cut = last is not None and last.finish_reason == "length"
        self._end_item("incomplete" if cut else "completed")
        prompt = len(self.talk.prompt_ids)
        self.response.usage = ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=InputDetails(cached_tokens=cached),
            output_tokens=output_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=prompt + output_tokens,
        )
        self.stored.messages.append(as_message(self.response.output))
        if cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        self.response.status = "incomplete" if cut else "completed"
        self._state(f"response.{self.response.status}")

    # Events

    def _publish(self, kind: str, **fields: Any) -> None:
        message = {"type": kind, "sequence_number": self.sequence_number, **fields}
        self.sequence_number += 1
        self.stored.publish(sse.event(kind, message))

    def _state(self, kind: str) -> None:
        self._publish(kind, response=self.response)

    def _take(self, event: Event) -> None:
        match event:
            case Content(text):
                item = self._text_item(MessageItem, "msg_", OutputText(text=""))
                item.content[0].text += text
                if text:
                    self._part("response.output_text.delta", item.id, delta=text, logprobs=[])
            case Reasoning(text):
                item = self._text_item(ReasoningItem, "rs_", ReasoningText(text=""))
                item.content[0].text += text
                self._part("response.reasoning_text.delta", item.id, delta=text)
            case ToolStart(call_id, name):
                self._end_item("completed")
                call = FunctionCallItem(
                    id=new_id("fc_"), call_id=call_id, name=name, arguments="", status="in_progress"
                )
                self._begin(call)
            case ToolArguments(text) if isinstance(self.item, FunctionCallItem):
                self.item.arguments += text
                self._at("response.function_call_arguments.delta", self.item.id, delta=text)

    def _text_item(self, kind: type[TextItem], prefix: str, part: OutputText | ReasoningText) -> TextItem:
        """The open item if it is of that kind, else a new one with an empty part."""
        if isinstance(self.item, kind):
            return self.item
        self._end_item("completed")
        item = kind(id=new_id(prefix), status="in_progress", content=[])
        self._begin(item)
        item.content.append(part)  # type: ignore[arg-type]
        self._part("response.content_part.added", item.id, part=part)
        return item

    def _begin(self, item: OutputItem) -> None:
        self.item = item
        self.response.output.append(item)
        self._publish("response.output_item.added", output_index=len(self.response.output) - 1, item=item)

    def _end_item(self, status: ItemStatus) -> None:
        item, self.item = self.item, None
        match item:
            case None:
                return
            case MessageItem():
                part = item.content[0]
                self._part("response.output_text.done", item.id, text=part.text, logprobs=[])
                self._part("response.content_part.done", item.id, part=part)
            case ReasoningItem():
                part = item.content[0]
                self._part("response.reasoning_text.done", item.id, text=part.text)
                self._part("response.content_part.done", item.id, part=part)
            case FunctionCallItem():
                item.arguments = item.arguments or "{}"
                self._at("response.function_call_arguments.done", item.id, name=item.name, arguments=item.arguments)
        item.status = status
        self._publish("response.output_item.done", output_index=len(self.response.output) - 1, item=item)

    def _at(self, kind: str, item_id: str, **fields: Any) -> None:
        self._publish(kind, item_id=item_id, output_index=len(self.response.output) - 1, **fields)

    def _part(self, kind: str, item_id: str, **fields: Any) -> None:
        self._at(kind, item_id, content_index=0, **fields)


def as_message(items: list[OutputItem]) -> dict[str, Any]:
    """What was said, as the assistant's turn of a chat that goes on."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        match item:
            case MessageItem():
                message["content"] += "".join(part.text for part in item.content)
            case ReasoningItem():
                thoughts = "".join(part.text for part in item.content)
                message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
            case FunctionCallItem():
                message.setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments))
    return message


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates read it. Arguments that were cut off are kept as text."""
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        decoded = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": decoded}}
