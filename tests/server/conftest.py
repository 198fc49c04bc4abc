"""Servers that many tests share. A test that changes a server's state starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import parrot
import pytest
from server_harness import ServerThread
from tiny_served import write_served_artifact

from runtime.server.config import ServerConfig


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a byte-level tokenizer, a ChatML template, 512 tokens of context."""
    return write_served_artifact(tmp_path_factory.mktemp("served") / "tiny", max_context_len=512)


@pytest.fixture(scope="session")
def server(artifact: Path) -> Iterator[ServerThread]:
    """The hash model: its text is noise, but the same whenever the history is."""
    with ServerThread({"tiny": artifact}) as running:
        yield running


@pytest.fixture(scope="session")
def parrot_server(artifact: Path) -> Iterator[ServerThread]:
    """The parrot, with the parsers for Hermes tool calls and `<think>`."""
    config = ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="think")
    with ServerThread({"parrot": artifact}, config, factory=parrot.FACTORY) as running:
        yield running
