"""`plancast zoo`: what it prints, as a person and as a program reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hub_server import HubServer
from tiny_hf import write_tiny_gguf, write_tiny_hf
from typer.testing import CliRunner, Result

from runtime.errors import ZooError
from zoo.cli import register

REPO = "owner/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.add(REPO, write_tiny_hf(tmp_path / "tiny"))
        yield server


def run(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["zoo", *arguments])


def succeed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_list_pull_show_remove(hub: HubServer) -> None:
    assert "smollm2-135m-instruct" in succeed("list")
    assert REPO not in succeed("list")
    assert succeed("pull", f"hub:{REPO}").startswith(f"hub:{REPO} from hub:{REPO} at {hub.repos[REPO].commit[:12]} in ")
    assert f"hub:{REPO}" in succeed("list")
    entries = json.loads(succeed("list", "--json"))
    assert [entry["pulled"]["source"] for entry in entries if entry["pulled"]] == [f"hub:{REPO}"]
    shown = json.loads(succeed("show", f"hub:{REPO}", "--json"))
    assert (shown["family"], shown["context_length"], shown["dtypes"]) == ("llama", 256, ["F32"])
    assert succeed("remove", f"hub:{REPO}").startswith(f"removed hub:{REPO}, ")
    assert REPO not in succeed("list")


def test_show_a_card_a_folder_and_a_gguf(hub: HubServer, tmp_path: Path) -> None:
    assert "apache-2.0" in succeed("show", "qwen3-0.6b")
    assert json.loads(succeed("show", "qwen3-0.6b", "--json"))["shape"]["layers"] == 28
    assert json.loads(succeed("show", str(tmp_path / "tiny"), "--json"))["source"] == "folder"
    write_tiny_gguf(tmp_path / "t.gguf")
    value = json.loads(succeed("show", f"gguf:{tmp_path / 't.gguf'}", "--json"))
    assert (value["family"], value["license"], value["types"]["Q8_0"]) == ("llama", "mit", 15)


def test_pull_as_json(hub: HubServer) -> None:
    assert json.loads(succeed("pull", f"hub:{REPO}", "--json"))["revision"] == hub.repos[REPO].commit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "smollm2-135m"), "did you mean 'smollm2-135m-instruct'"),
        (("show", "hub:a/b"), "is not pulled"),
        (("remove", "qwen3-0.6b"), "is not pulled"),
        (("pull", "hub:a/b"), "has no model a/b"),
    ],
)
def test_errors_are_ours(hub: HubServer, arguments: tuple[str, ...], message: str) -> None:
    """The front door prints a `PlancastError` as one line; nothing else may come out of a command."""
    result = run(*arguments)
    assert isinstance(result.exception, ZooError)
    assert message in str(result.exception)
