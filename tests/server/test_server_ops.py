"""What an operator relies on: probes, metrics, ids, logs, keys, CORS, TLS, sockets, and limits under load."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import parrot
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import ServerThread, wait_until

from runtime.server.config import RequestLimits, ServerConfig
from runtime.server.run import listen

BODY = {"prompt": "Paris", "max_tokens": 4}


def metrics_of(server: ServerThread) -> dict[str, float]:
    """Samples by name, those of one model."""
    with server.client() as client:
        text = client.get("/metrics").text
    return {
        sample.name
        + "".join(
            f"[{value}]" for key, value in sample.labels.items() if key in ("finished_reason", "err")
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_health_ready_and_version(server: ServerThread):
    with server.client() as client:
        for path in ("/health", "/ready", "/ping"):
            assert client.get(path).json() == {"status": "ok"}
        assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/version").json()["version"])


def test_metrics_count_under_vllms_names(artifact):
    # Steps that take a while: tokens of a fast engine arrive merged, and have no time between them.
    with ServerThread({"tiny": artifact}, factory_args={"step_s": 0.02}) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True})
        client.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True, "stream": True})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
        found = metrics_of(server)
        raw = client.get("/metrics")
    assert raw.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in raw.text
    assert found["vllm:prompt_tokens_total"] >= 40
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:request_success_total[length]"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] > 0
    assert found["vllm:request_generation_tokens_sum"] == 10
    assert 0 < found["vllm:prefix_cache_hits_total"] <= found["vllm:prefix_cache_queries_total"]
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:num_preemptions_total"] == 0
    assert found["tgi_request_count_total"] == found["tgi_request_success_total"] == 2
    assert found["tgi_request_failure_total[validation]"] == 1


def test_every_metric_of_the_grafana_board_exists(artifact):
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = set(re.findall(r"\b((?:vllm:|tgi_)\w+)", json.dumps(board)))
    assert len(asked) > 15
    with ServerThread({"tiny": artifact}, factory_args={"step_s": 0.02}) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, "ignore_eos": True, "stream": True})
        client.post("/v1/completions", json={})
        text = client.get("/metrics").text
    missing = {name for name in asked if not re.search(rf"^{name}(\{{| )", text, re.MULTILINE)}
    assert not missing


def test_a_request_id_is_kept_or_made_and_fit_for_a_header(server: ServerThread):
    with server.client() as client:
        assert client.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        for bad in ("", "a" * 129, "a\tb"):
            made = client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", made)
        assert client.post("/v1/completions", json={}).headers["x-request-id"]


def test_json_logs_have_the_request_id_and_the_counts(server: ServerThread):
    from runtime.server.logs import JsonFormatter

    lines: list[dict] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    logger, handler = logging.getLogger("plancast.server"), Keep()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with server.client(headers={"x-request-id": "log-me"}) as client:
            client.post("/v1/completions", json=BODY)
            client.post("/v1/completions", json=BODY | {"stream": True})
            client.post("/v1/completions", json={})
        # A line is written when its answer is out: others' may still come, too.
        wait_until(lambda: [line["request_id"] for line in lines].count("log-me") == 3)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    ours = sorted((line for line in lines if line["request_id"] == "log-me"), key=lambda line: line["status"])
    assert [line["status"] for line in ours] == [200, 200, 400]
    for line in ours[:2]:
        assert line["message"] == "POST /v1/completions"
        assert line["completion_tokens"] == 4
        assert line["ms"] > 0


def test_traces_reach_an_otlp_collector_under_the_callers_trace(artifact):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    config = ServerConfig(port=0, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    try:
        with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
            client.post("/v1/completions", json=BODY | {"ignore_eos": True}, headers={"traceparent": parent})
    finally:
        collector.shutdown()
        collector.server_close()
    (span,) = ExportTraceServiceRequest.FromString(received[0]).resource_spans[0].scope_spans[0].spans
    attributes = {item.key: item.value for item in span.attributes}
    assert span.name == "llm_request"
    assert span.trace_id.hex() == parent.split("-")[1]
    assert span.parent_span_id.hex() == parent.split("-")[2]
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 4
    assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0
    assert span.end_time_unix_nano > span.start_time_unix_nano


# Keys


def test_api_keys_guard_everything_but_probes_metrics_and_the_page(artifact):
    config = ServerConfig(port=0, api_keys=("first", "second"))
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        for path in ("/v1/models", "/info", "/live", "/openapi.json", "/v1/responses/x"):
            assert client.get(path).status_code == 401, path
        refused = client.post("/v1/completions", json=BODY)
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        for wrong in ("third", "firs", "first2", "ключ"):
            header = {"authorization": f"Bearer {wrong}".encode()}
            assert client.post("/v1/completions", json=BODY, headers=header).status_code == 401
        for right in ("first", "second"):
            header = {"authorization": f"Bearer {right}"}
            assert client.post("/v1/completions", json=BODY, headers=header).status_code == 200
        assert client.post("/v1/messages/count_tokens", json={}, headers={"x-api-key": "first"}).status_code == 400
        for path in ("/health", "/ready", "/version", "/metrics", "/", "/static/main.js"):
            assert client.get(path).status_code == 200, path
        tgi = client.post("/generate", json={"inputs": "a"})
        assert (tgi.status_code, tgi.json()["error_type"]) == (401, "authentication")
        assert server.openai(api_key="first").models.list().data
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="wrong").models.list()


def test_admin_routes_load_and_unload_models(artifact, tmp_path):
    config = ServerConfig(port=0, api_keys=("user",), admin_keys=("admin",))
    admin, user = {"authorization": "Bearer admin"}, {"authorization": "Bearer user"}
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        load = {"path": str(artifact), "name": "other"}
        assert client.post("/admin/models", json=load, headers=user).status_code == 401
        assert client.post("/admin/models", json=load, headers=admin).json()["id"] == "other"
        assert client.post("/admin/models", json=load, headers=admin).status_code == 409
        names = [model["id"] for model in client.get("/v1/models", headers=user).json()["data"]]
        assert names == ["tiny", "other"]
        ambiguous = client.post("/v1/completions", json=BODY, headers=user)
        assert ambiguous.status_code == 400
        assert "tiny, other" in ambiguous.json()["error"]["message"]
        for name in names:
            done = client.post("/v1/completions", json=BODY | {"model": name}, headers=user)
            assert done.json()["model"] == name
        assert client.delete("/admin/models/other", headers=admin).json()["deleted"]
        assert client.post("/v1/completions", json=BODY | {"model": "other"}, headers=user).status_code == 404
        assert client.post("/v1/completions", json=BODY, headers=user).status_code == 200
        missing = client.post("/admin/models", json={"path": str(tmp_path / "no")}, headers=admin)
        assert missing.status_code == 400
        assert str(tmp_path / "no") in missing.json()["error"]["message"]
        assert client.delete("/admin/models/nope", headers=admin).status_code == 404


def test_admin_routes_are_off_without_an_admin_key(server: ServerThread):
    with server.client() as client:
        response = client.post("/admin/models", json={"path": "/"}, headers={"authorization": "Bearer x"})
        assert response.status_code == 403
        assert "admin-key-file" in response.json()["error"]["message"]


def test_unloading_ends_what_runs(artifact):
    config = ServerConfig(port=0, admin_keys=("admin",))
    with (
        ServerThread({"tiny": artifact}, config, factory_args={"step_s": 0.02}) as server,
        ThreadPoolExecutor() as pool,
    ):
        body = BODY | {"max_tokens": 400, "ignore_eos": True}
        running = pool.submit(lambda: server.client().post("/v1/completions", json=body))
        wait_until(lambda: server.stats().num_running == 1)
        with server.client(headers={"authorization": "Bearer admin"}) as client:
            assert client.delete("/admin/models/tiny").status_code == 200
            assert running.result(10).status_code == 503
            assert client.get("/ready").json()["error"]["code"] == "no_model"


def test_keys_come_from_files_and_the_environment(tmp_path):
    from runtime.errors import PlancastError
    from runtime.server.auth import load_keys

    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \n")
    assert load_keys(["zero"], file, {"K": "three, four"}, "K") == ("zero", "three", "four", "one", "two")
    assert load_keys([], None, {}, "K") == ()
    file.write_text("# none\n")
    with pytest.raises(PlancastError, match="holds no key"):
        load_keys([], file, {}, "K")
    with pytest.raises(PlancastError, match="cannot read"):
        load_keys([], tmp_path / "missing", {}, "K")
    with pytest.raises(PlancastError, match="empty"):
        load_keys([""], None, {}, "K")


# Where it listens


def test_cors_answers_preflights_of_known_origins_only(artifact):
    config = ServerConfig(port=0, api_keys=("key",), cors_origins=("https://app.example",))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        known = client.options("/v1/completions", headers=ask | {"origin": "https://app.example"})
        assert known.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = client.post("/v1/completions", json=BODY, headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_tls(artifact, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    config = ServerConfig(port=0, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    with ServerThread({"tiny": artifact}, config) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with server.client(verify=trusted) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_unix_socket(artifact, tmp_path):
    path = tmp_path / "server.sock"
    transport = httpx.HTTPTransport(uds=str(path))
    server = ServerThread({"tiny": artifact}, ServerConfig(uds=str(path)))
    with server, httpx.Client(transport=transport, base_url=server.url) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert not path.exists()


def test_a_root_path_that_a_proxy_strips(artifact):
    config = ServerConfig(port=0, root_path="/llm", api_keys=("key",))
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.post("/generate", json={}).json()["error_type"] == "authentication"
        schema = client.get("/openapi.json", headers={"authorization": "Bearer key"}).json()
        assert schema["servers"] == [{"url": "/llm"}]


def test_a_taken_port_is_told_before_an_engine_is_loaded(server: ServerThread, artifact):
    from runtime.errors import PlancastError

    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(PlancastError, match=f"127.0.0.1:{port}"):
        ServerThread({"tiny": artifact}, ServerConfig(port=port)).__enter__()


def test_answers_are_not_held_back_by_nagles_delay():
    """asyncio sets TCP_NODELAY only on sockets whose protocol is named; else small answers wait 40 ms."""
    with listen(ServerConfig(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


# Overload


@pytest.fixture
def small_server(artifact):
    """Four sequences at once, a step takes 20 ms."""
    config = ServerConfig(port=0, max_concurrent_requests=4, limits=RequestLimits(max_n=8))
    with ServerThread({"parrot": artifact}, config, factory=parrot.FACTORY, factory_args={"step_s": 0.02}) as running:
        yield running


def test_over_the_limit_is_429_with_retry_after(small_server: ServerThread):
    body = {"prompt": "Paris", "max_tokens": 40, "n": 3, "temperature": 1}
    with ThreadPoolExecutor() as pool, small_server.client() as client:
        running = pool.submit(lambda: small_server.client().post("/v1/completions", json=body))
        wait_until(lambda: small_server.stats().num_running)
        for path, more in (("/v1/completions", body), ("/v1/completions", body | {"stream": True})):
            refused = client.post(path, json=more)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "4" in refused.json()["error"]["message"]
        tgi = client.post("/generate", json={"inputs": "Paris", "parameters": {"best_of": 3, "do_sample": True}})
        assert (tgi.status_code, tgi.json()["error_type"]) == (429, "overloaded")
        assert client.post("/v1/completions", json=BODY).status_code == 200  # one place is free
        assert running.result(30).status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200
        never = client.post("/v1/completions", json=body | {"n": 5})
        assert never.status_code == 400
        assert never.json()["error"]["param"] == "n"
    assert small_server.state.admission.in_flight == 0


def test_the_openai_client_retries_its_way_through(small_server: ServerThread):
    """A 429 with Retry-After is what the client's own retries understand."""
    client = small_server.openai(max_retries=20)

    def one(number: int) -> str:
        done = client.completions.create(model="parrot", prompt=f"item {number} ", max_tokens=12)
        return done.choices[0].finish_reason

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == ["length"] * 12


def test_a_request_that_waits_too_long_is_503(artifact):
    server = ServerThread(
        {"parrot": artifact},
        factory=parrot.FACTORY,
        factory_args={"step_s": 0.02},
        max_num_seqs=1,
        queue_timeout=0.2,
    )
    with server, ThreadPoolExecutor() as pool, server.client() as client:
        first = pool.submit(lambda: server.client().post("/v1/completions", json=BODY | {"max_tokens": 60}))
        wait_until(lambda: server.stats().num_running == 1)
        late = client.post("/v1/completions", json=BODY)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in late.headers
        assert client.post("/v1/completions", json=BODY | {"stream": True}).status_code == 503
        assert first.result(30).status_code == 200


def test_a_draining_server_refuses_new_work_and_says_so(artifact):
    with ServerThread({"tiny": artifact}) as server, server.client() as client:
        server.state.admission.draining = True
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json()["error"]["code"] == "draining"
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
