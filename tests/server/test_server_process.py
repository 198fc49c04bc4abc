"""`plancast serve` as a process with its engine in another: start, refuse to start, drain, end, and leave nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import typer
import typer.testing
from server_harness import wait_until
from tiny_served import ROOT, executor_environment

from runtime.errors import PlancastError
from runtime.iteration_log import LogStep, read_log
from runtime.serve_cli import register

COMMAND = [sys.executable, str(ROOT / "plancast.py"), "serve"]
START_S = 60.0
SLOW = "parrot:open_slow"  # a step takes 20 ms


class ServeProcess:
    """A running `plancast serve`; `lines` is its log."""

    def __init__(self, *arguments: str, factory: str = "tiny_served:open_hash", **environment: str):
        env = executor_environment() | {"PLANCAST_EXECUTOR_FACTORY": factory} | environment
        self.process = subprocess.Popen(
            [*COMMAND, "--port", "0", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env
        )
        self.lines: list[str] = []
        self._address: Future[str] = Future()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._address.result(START_S)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        wait_until(self._answers)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if (found := re.search(r"serving .* at (https?://[^\s\"]+)", line)) and not self._address.done():
                self._address.set_result(found[1])
        if not self._address.done():
            self._address.set_exception(AssertionError("\n".join(self.lines)))

    def _answers(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def is_gone(self) -> bool:
        """The server and every process that it started."""
        return self.process.poll() is not None and not any(child.is_running() for child in self.children)


@contextmanager
def serving(*arguments: str, **options: str) -> Iterator[ServeProcess]:
    server = ServeProcess(*arguments, **options)
    try:
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


LONG = {"prompt": "Paris", "max_tokens": 250, "ignore_eos": True}


def post(server: ServeProcess, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def running(server: ServeProcess, count: int) -> bool:
    text = server.client.get("/metrics").text
    return f'vllm:num_requests_running{{engine="0",model_name="tiny-byte_level"}} {count}.0' in text


def test_it_serves_and_ends_well(artifact: Path):
    with serving(str(artifact)) as server:
        done = post(server, {"prompt": "Paris", "max_tokens": 4}).json()
        assert done["model"] == "tiny-byte_level"
        assert len(server.children) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        wait_until(server.is_gone, 5)


def test_two_artifacts_under_names_of_their_own(artifact: Path, tmp_path: Path):
    log = tmp_path / "steps.jsonl"
    with serving(f"one={artifact}", f"two={artifact}", "--iteration-log", str(log)) as server:
        names = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert names == ["one", "two"]
        answers = {
            post(server, {"prompt": "a", "max_tokens": 6, "temperature": 0, "model": name}).json()["model"]
            for name in names
        }
        assert answers == {"one", "two"}
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        wait_until(server.is_gone, 5)
    # An iteration log each, told apart by the artifact's folder.
    logs = sorted(tmp_path.iterdir())
    assert [file.name for file in logs] == ["steps-tiny-2.jsonl", "steps-tiny.jsonl"]
    for file in logs:
        _, steps, _ = read_log(str(file))
        assert len([step for step in steps if isinstance(step, LogStep)]) >= 6


def test_case_21_sigterm_drains_what_runs(artifact: Path):
    """Case 21: on the first SIGTERM what runs is finished, streams included; new work is refused."""
    with serving(str(artifact), "--shutdown-timeout", "30", "--log-format", "json", factory=SLOW) as server:
        with ThreadPoolExecutor() as pool:
            requests = [pool.submit(post, server, LONG | {"stream": stream}) for stream in (False, True, False)]
            wait_until(lambda: running(server, 3))
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")
            for request in requests:
                response = request.result(30)
                assert response.status_code == 200
                assert '"finish_reason":"length"' in response.text
        assert server.process.wait(20) == 0
        wait_until(server.is_gone, 5)
    lines = [json.loads(line) for line in server.lines]
    assert any(line["message"] == "draining" and line["in_flight"] == 3 for line in lines)
    assert not [line for line in lines if line["level"] == "error"]


def test_case_21_the_drain_has_a_limit(artifact: Path):
    """Case 21: after `--shutdown-timeout` what still runs is cut off, with an answer where none was begun."""
    with serving(str(artifact), "--shutdown-timeout", "1", factory=SLOW) as server:
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(post, server, LONG | {"max_tokens": 450})
            stream = pool.submit(post, server, LONG | {"max_tokens": 450, "stream": True})
            wait_until(lambda: running(server, 2))
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0
            assert whole.result(10).status_code == 503
            assert whole.result().json()["error"]["code"] == "shutdown"
            with pytest.raises(httpx.RemoteProtocolError):
                stream.result(10)
        wait_until(server.is_gone, 5)


def test_case_21_a_second_sigterm_ends_at_once(artifact: Path):
    """Case 21: SIGTERM twice under load: no waiting, and no process left behind."""
    with serving(str(artifact), "--shutdown-timeout", "300", factory=SLOW) as server:
        with ThreadPoolExecutor() as pool:
            requests = [pool.submit(post, server, LONG | {"max_tokens": 450}) for _ in range(4)]
            wait_until(lambda: running(server, 4))
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            for request in requests:
                assert request.exception(10) is not None or request.result().status_code == 503
        wait_until(server.is_gone, 5)


def test_streams_go_on_when_the_engines_process_dies(artifact: Path):
    """The engine is killed in mid-stream: the server restarts it, and the client sees one unbroken answer."""
    body = LONG | {"temperature": 0}
    with serving(str(artifact), factory=SLOW) as server, ThreadPoolExecutor() as pool:
        expected = post(server, body).json()["choices"][0]["text"]
        stream = pool.submit(post, server, body | {"stream": True})
        wait_until(lambda: running(server, 1))
        time.sleep(0.3)
        server.children[0].kill()
        chunks = [json.loads(line[6:]) for line in stream.result(60).text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


REFUSED = [
    (["/no/such/artifact"], "no artifact at /no/such/artifact"),
    (["ARTIFACT", "--log-format", "xml"], "--log-format is 'xml': choose one of text, json"),
    (["ARTIFACT", "--tool-call-parser", "gpt"], "--tool-call-parser is 'gpt': choose auto, none, hermes"),
    (["ARTIFACT", "--ssl-certfile", "x"], "TLS needs both"),
    (["ARTIFACT", "--api-key", ""], "an API key is empty"),
    (["ARTIFACT", "--api-key-file", "/no/keys"], "cannot read the key file /no/keys"),
    (["ARTIFACT", "--kv-cache-memory", "lots"], "lots"),
    (["ARTIFACT", "--max-context-len", "100000"], "max_context_len 100000"),
    (["ARTIFACT", "--scheduling-policy", "magic"], "magic"),
    (["ARTIFACT", "--iteration-log", "/no/such/log"], "--iteration-log /no/such/log: there is no folder /no/such"),
    (["ARTIFACT", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_start_says_why(artifact: Path, arguments: list[str], message: str, monkeypatch):
    monkeypatch.setattr("runtime.server.logs.configure", lambda *_: None)  # this process keeps its own logs
    app = typer.Typer()
    register(app)
    given = [str(artifact) if argument == "ARTIFACT" else argument for argument in arguments]
    result = typer.testing.CliRunner().invoke(app, ["--port", "0", *given])
    assert isinstance(result.exception, PlancastError)
    assert message in str(result.exception)


def test_a_refusal_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [*COMMAND, "/no/such/artifact"], capture_output=True, text=True, env=executor_environment(), timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "error: no artifact at /no/such/artifact: build one with `plancast build RECIPE`\n"
