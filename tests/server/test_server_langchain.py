"""LangChain's OpenAI chat model, and curl: the calls that their users make."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from server_harness import ServerThread

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture
def chat(parrot_server: ServerThread):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{parrot_server.url}/v1", api_key="none", model="parrot", temperature=0, max_retries=0)


def test_invoke_stream_and_batch(chat):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    done = chat.invoke([SystemMessage("Repeat."), HumanMessage("hello there")])
    assert isinstance(done, AIMessage)
    assert done.content == "hello there"
    assert done.usage_metadata["output_tokens"] > 1
    assert "".join(chunk.content for chunk in chat.stream("hello there")) == "hello there"
    assert [message.content for message in chat.batch(["one", "two", "three"])] == ["one", "two", "three"]


def test_tools_bind_and_are_called(chat):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    bound = chat.bind_tools([add])
    asked = HumanMessage(CALL)
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    assert bound.invoke([asked, answer, result, HumanMessage("5, then")]).content == "5, then"
    streamed = None
    for chunk in bound.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"a": 2, "b": 3}


def test_structured_output(server: ServerThread):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=150)

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="tiny", seed=1)
    for method in ("json_schema", "function_calling"):
        person = chat.with_structured_output(Person, method=method).invoke("Who?")
        assert isinstance(person, Person)
        assert person.age <= 150


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(parrot_server: ServerThread):
    def curl(*arguments: str) -> str:
        return subprocess.run(
            ["curl", "-sS", *arguments], check=True, capture_output=True, text=True, timeout=30
        ).stdout

    body = json.dumps({"messages": [{"role": "user", "content": "hello there"}]})
    post = ["-H", "content-type: application/json", f"{parrot_server.url}/v1/chat/completions", "-d"]
    assert json.loads(curl(*post, body))["choices"][0]["message"]["content"] == "hello there"
    events = curl("-N", *post, body[:-1] + ', "stream": true}').split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(curl(f"{parrot_server.url}/v1/models"))["data"][0]["id"] == "parrot"
    plain = json.loads(curl(f"{parrot_server.url}/v1/completions", "-d", '{"prompt": "a"}'))
    assert "content-type must be application/json" in plain["error"]["message"]
