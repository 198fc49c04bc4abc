"""`plancast bench serve | throughput | latency`: workloads, arrivals, the client, the figures and the reports."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import typer
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import ServerThread
from tiny_served import executor_environment, write_served_artifact

from bench.serving.charts import line_chart
from bench.serving.cli import latency, serve
from bench.serving.client import Endpoint, Reply, RequestFailed, fetch, stream
from bench.serving.metrics import latencies, parse_goodput, peak_concurrency, percentile, summarize, timeline
from bench.serving.offline import bench_throughput
from bench.serving.report import html_offline, html_report, rows_of
from bench.serving.run import Target, play
from bench.serving.serve import Load, describe_run
from bench.serving.workload import Ask, Workload, poisson, shared_prefix, sharegpt, synthetic, trace
from runtime.errors import PlancastError
from runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_artifact(tmp_path_factory.mktemp("bench") / "tiny", max_context_len=512)


@pytest.fixture(scope="module")
def server(artifact: Path):
    with ServerThread({"tiny": artifact}, factory_args={"step_s": 0.002}) as running:
        yield running


# The client


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_streamed_reply_is_the_unstreamed_answer_with_its_times(server: ServerThread, route: str):
    endpoint = Endpoint(f"{server.url}/v1")  # as clients of OpenAI write it
    chat = "chat" in route
    asked = {"messages": [{"role": "user", "content": "Paris"}]} if chat else {"prompt": "Paris"}
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True, **asked}
    whole = asyncio.run(fetch(endpoint, "POST", route, body))
    reply = asyncio.run(stream(endpoint, route, body))
    choice = whole["choices"][0]
    assert reply.error is None
    assert reply.done
    assert reply.text == (choice["message"]["content"] if chat else choice["text"])
    assert reply.finish_reason == choice["finish_reason"] == "length"
    assert (reply.prompt_tokens, reply.output_tokens) == (whole["usage"]["prompt_tokens"], 40)
    assert reply.times == sorted(reply.times)
    assert 0 < reply.ttft <= reply.latency
    assert reply.latency >= 38 * 0.002  # forty steps of two milliseconds, the last tokens of which may hold no text
    assert len(reply.gaps) == len(reply.times) - 1


def test_what_fails_is_in_the_reply(server: ServerThread):
    endpoint = Endpoint(server.url)
    missing = asyncio.run(stream(endpoint, "/v1/completions", {"model": "other", "prompt": "a"}))
    assert missing.error is not None
    assert "404" in missing.error
    nobody = asyncio.run(stream(Endpoint("http://127.0.0.1:9"), "/v1/completions", {"prompt": "a"}))
    assert nobody.error is not None
    slow = asyncio.run(
        stream(Endpoint(server.url, timeout=0.05), "/v1/completions", {"prompt": "a", "max_tokens": 400})
    )
    assert slow.error == "no whole answer within 0.05 s"
    with pytest.raises(RequestFailed, match="status 405"):
        asyncio.run(fetch(endpoint, "GET", "/v1/completions"))


async def _answering(raw: bytes) -> Reply:
    """What comes of a server that says `raw` and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        return await stream(Endpoint(f"http://127.0.0.1:{port}"), "/v1/completions", {})


def test_other_servers_answers():
    """Events without usage, over several packets' worth of separators; an error in mid-stream; a line cut off."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    events = b"".join(
        b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\r\n\r\n' % (text, finish)
        for text, finish in ((b"a", b"null"), (b"b", b'"stop"'))
    )
    good = asyncio.run(
        _answering(head.replace(b"connection", b"content-length: %d\r\nconnection" % len(events)) + events)
    )
    assert (good.text, good.output_tokens, good.finish_reason, good.error) == ("ab", 2, "stop", None)
    failed = b'data: {"error":{"message":"out of memory"}}\n\n'
    broken = asyncio.run(
        _answering(head.replace(b"connection", b"content-length: %d\r\nconnection" % len(failed)) + failed)
    )
    assert broken.error == "out of memory"
    cut = asyncio.run(_answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda"))
    assert cut.error is not None
    assert "closed" in cut.error
    assert "not HTTP" in (asyncio.run(_answering(b"hello\r\n\r\n")).error or "")


# Playing


def _asks(count: int, tokens: int = 12) -> list[Ask]:
    return [Ask(f"Request {number}", tokens) for number in range(count)]


def test_no_more_than_so_many_at_a_time(server: ServerThread):
    target = Target(Endpoint(server.url), "tiny")
    replies, _, seconds = asyncio.run(play(target, _asks(20), concurrency=3, arrivals=None))
    assert [reply.error for reply in replies] == [None] * 20
    assert peak_concurrency(replies) == 3
    assert seconds >= 20 / 3 * 12 * 0.002


def test_requests_arrive_when_they_are_due(server: ServerThread):
    target = Target(Endpoint(server.url), "tiny")
    due = [0.0, 0.1, 0.35, 0.4]
    replies, begin, _ = asyncio.run(play(target, _asks(4), concurrency=None, arrivals=due))
    for reply, at in zip(replies, due, strict=True):
        assert reply.started - begin >= at - 1e-3


# Figures


def _reply(started: float, times: list[float], tokens: int, prompt: int = 10) -> Reply:
    return Reply(started, "x", "stop", True, prompt, tokens, times, times[-1])


def test_figures_by_hand():
    replies = [_reply(0.0, [0.1, 0.2, 0.4], 3), _reply(0.2, [0.3, 0.5], 5), Reply(0.0, error="status 500")]
    figures = summarize(replies, 2.0, {"ttft": 200.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 4.0
    assert figures["total_token_throughput"] == 14.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((150 + 50) / 2)  # 0.3 s over 2 tokens, 0.2 s over 4
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["p99_e2el_ms"] == pytest.approx(np.percentile([400, 500], 99))
    assert figures["max_concurrent_requests"] == 2
    assert latencies(replies[:1])["itl"] == pytest.approx([100, 200])


def test_a_run_without_answers_has_figures_too():
    figures = summarize([Reply(0.0, error="status 500")], 1.0, {})
    assert figures["completed"] == 0
    assert math.isnan(figures["p99_ttft_ms"])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float):
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share), rel=1e-9, abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    )
)
def test_a_timeline_keeps_every_token_and_every_second(parts: list):
    replies = [_reply(start, np.cumsum(gaps).tolist(), tokens) for start, gaps, tokens in parts]
    line = timeline(replies, 0.0, bins=30)
    width = line["seconds"][1] - line["seconds"][0]
    assert sum(line["tokens_per_second"]) * width == pytest.approx(sum(reply.output_tokens for reply in replies))
    assert sum(line["running"]) * width == pytest.approx(sum(reply.latency for reply in replies), abs=1e-6)


def test_a_run_of_failures_is_written_as_json():
    failed = [Reply(0.0, error="status 500"), Reply(0.0, error="status 500")]
    run = describe_run(Load(Workload(), concurrency=2), failed, 0.0, 1.0, {})
    assert run["errors"] == {"status 500": 2}
    assert json.loads(json.dumps(run, allow_nan=False))["p99_ttft_ms"] is None
    assert dict(rows_of([run]))["p99 TTFT, ms"] == ["-"]
    around = {"machine": {"processor": "p", "cores": 1, "date": "d"}, "target": "t", "model_id": "m", "workload": "w"}
    assert "status" not in html_report(around | {"seed": 0, "steps": [], "runs": [run, run]})


def test_goodput_limits_are_read_or_refused():
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}
    for wrong in ("ttft", "ttft:", "itl:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(PlancastError, match="ttft:200"):
            parse_goodput([wrong])


# Workloads


def test_synthetic_prompts_have_the_length_and_share_no_prefix(artifact: Path):
    encode = Tokenizer.load(artifact).encode
    asks = synthetic(encode, 60, 128, 32, 0.0, seed=1)
    assert {len(ask.prompt) for ask in asks} == {128}
    assert len({tuple(ask.prompt[:16]) for ask in asks}) == 60
    others = synthetic(encode, 60, 128, 32, 0.0, seed=2)
    assert not {tuple(ask.prompt[:16]) for ask in asks} & {tuple(ask.prompt[:16]) for ask in others}
    assert asks == synthetic(encode, 60, 128, 32, 0.0, seed=1)
    spread = synthetic(encode, 200, 100, 50, 0.5, seed=0)
    lengths = [len(ask.prompt) for ask in spread]
    assert (min(lengths), max(lengths)) >= (50, 140)
    assert max(lengths) <= 150
    assert statistics.mean(lengths) == pytest.approx(100, abs=8)
    assert all(isinstance(ask.prompt, str) for ask in synthetic(None, 3, 20, 8, 0.0, 0))


def test_shared_prefixes_are_shared(artifact: Path):
    encode = Tokenizer.load(artifact).encode
    asks = shared_prefix(encode, 12, prefixes=3, prefix=64, inputs=16, outputs=8, seed=0)
    heads = [tuple(ask.prompt[:64]) for ask in asks]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(ask.prompt) for ask in asks}) == 12
    chats = shared_prefix(None, 12, prefixes=3, prefix=64, inputs=16, outputs=8, seed=0)
    assert len({ask.system for ask in chats}) == 3


def test_a_sharegpt_file(tmp_path: Path, artifact: Path):
    encode = Tokenizer.load(artifact).encode
    turns = [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("a", "b"),
        ("x " * 3000, "too long"),
    ]
    items = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    file = tmp_path / "s.json"
    file.write_text(json.dumps([*items, {"conversations": []}]))
    (ask,) = sharegpt(file, encode, 10, None, seed=0)
    assert (ask.prompt, ask.output_tokens) == (turns[0][0], len(encode(turns[0][1])))
    assert sharegpt(file, encode, 10, 99, seed=0)[0].output_tokens == 99
    for content in ("[]", "{", "[1]", json.dumps(items[1:])):
        file.write_text(content)
        with pytest.raises(PlancastError, match=r"s\.json"):
            sharegpt(file, encode, 10, None, seed=0)


def test_traces_of_both_kinds(tmp_path: Path, artifact: Path):
    encode = Tokenizer.load(artifact).encode
    mooncake = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 27_000 + 500 * n, "input_length": 20 + n, "output_length": 5, "hash_ids": [0]} for n in range(4)
    ]
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    asks = trace(mooncake, encode, None, 2.0, seed=0)
    assert [ask.at for ask in asks] == [0.0, 0.25, 0.5, 0.75]
    assert [len(ask.prompt) for ask in asks] == [20, 21, 22, 23]
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,4\n2023-11-16 18:17:04.4799600,30,7\n"
    )
    asks = trace(azure, encode, None, 1.0, seed=0)
    assert [ask.at for ask in asks] == pytest.approx([0.0, 0.5])
    assert [ask.output_tokens for ask in asks] == [4, 7]
    for text in ("", "{}", "no", '{"timestamp": 1}'):
        mooncake.write_text(text)
        with pytest.raises(PlancastError, match="trace"):
            trace(mooncake, encode, None, 1.0, seed=0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float):
    gaps = np.diff(poisson(20_000, 8.0, burstiness, seed=0))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


# Reports and commands


def test_charts_are_well_formed_whatever_the_points():
    for series in ({}, {"a": []}, {"a": [(1, 2)]}, {"a<b>": [(0, 0), (5, math.nan)], "b": [(1, 3), (2, 5)]}):
        for log_x in (False, True):
            ET.fromstring(line_chart("T & t", series, "x", "y", log_x=log_x))


def test_bench_serve_from_the_command_line(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On an artifact that it serves itself: a sweep, with the engine's steps, as JSON and as HTML."""
    for name, value in executor_environment().items():
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.command()(serve)
    out = [f"--json={tmp_path / 'r.json'}", f"--html={tmp_path / 'r.html'}"]
    sizes = ["--num-prompts=8", "--input-tokens=40", "--input-tokens=80", "--output-tokens=12", "--goodput=ttft:60000"]
    arguments = [str(artifact), "--concurrency=1", "--concurrency=4", *sizes, *out]
    done = typer.testing.CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((tmp_path / "r.json").read_text())
    swept = [(run["input_tokens"], run["max_concurrency"]) for run in report["runs"]]
    assert swept == [(40, 1), (40, 4), (80, 1), (80, 4)]
    for run in report["runs"]:
        assert (run["completed"], run["total_output_tokens"]) == (8, 96)
        assert run["total_input_tokens"] == 8 * run["input_tokens"]
        assert run["request_goodput"] == run["request_throughput"]
        assert run["max_concurrent_requests"] == run["max_concurrency"]
        assert run["median_ttft_ms"] <= run["p99_ttft_ms"] <= run["p99_e2el_ms"]
    assert sum(decode + prefill for _, decode, prefill, _ in report["steps"]) >= 2 * 8 * 40
    page = (tmp_path / "r.html").read_text()
    for text in (
        "Throughput against concurrency",
        "Median TPOT against prompt length",
        "Tokens in each step",
        "p99 TTFT, ms",
        report["machine"]["processor"],
    ):
        assert text in page


def test_bench_serve_at_a_url(server: ServerThread):
    app = typer.Typer()
    app.command()(serve)
    sizes = [
        "--num-prompts=6",
        "--output-tokens=8",
        "--dataset=shared-prefix",
        "--prefix-tokens=20",
        "--input-tokens=9",
    ]
    done = typer.testing.CliRunner().invoke(app, [server.url, "--rate=100", "--api=chat", *sizes])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "100 requests/s" in done.stdout
    failing = typer.testing.CliRunner().invoke(app, [server.url, "--output-tokens=5000", *sizes[:1]])
    assert isinstance(failing.exception, PlancastError)
    assert "5000" in str(failing.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:9"], "is a server there"),
        (["/no/such/artifact"], "neither an artifact's folder nor a URL"),
        (["http://x", "--concurrency=2", "--rate=1"], "not both"),
        (["http://x", "--dataset=sharegpt"], "needs --dataset-path"),
        (["http://x", "--dataset-path=/f"], "takes no --dataset-path"),
        (["http://x", "--dataset=trace", "--dataset-path=/f", "--rate=1"], "own times"),
        (["http://x", "--goodput=fast"], "ttft:200"),
        (["http://x", "--extra-body=[1]"], "JSON object"),
        (["http://127.0.0.1:9", "--serve-argument=--port=1"], "target is a URL"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str):
    app = typer.Typer()
    app.command()(serve)
    done = typer.testing.CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, PlancastError), done.output
    assert said in str(done.exception)


def test_throughput_and_latency_in_this_process(artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    encode = Tokenizer.load(artifact).encode
    asks = synthetic(encode, 10, 30, 6, 0.0, seed=0)
    report = bench_throughput(artifact, asks, engine_options={"executor_factory": "tiny_served:open_hash"})
    figures = report["figures"]
    assert (figures["num_requests"], figures["total_num_tokens"], figures["num_output_tokens"]) == (10, 360, 60)
    assert figures["output_tokens_per_second"] == pytest.approx(60 / figures["elapsed_time"])
    assert "Requests as they end" in html_offline(report | {"workload": "w"})

    monkeypatch.setenv("PLANCAST_EXECUTOR_FACTORY", "tiny_served:open_hash")
    app = typer.Typer()
    app.command()(latency)
    sizes = ["--batch-size=3", "--input-tokens=20", "--output-tokens=5", "--iterations=4", "--warmup=1"]
    done = typer.testing.CliRunner().invoke(app, [str(artifact), *sizes, f"--json={tmp_path / 'l.json'}"])
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((tmp_path / "l.json").read_text())
    assert len(report["latencies"]) == 4
    assert report["figures"]["avg_latency"] == pytest.approx(statistics.fmean(report["latencies"]))
