"""Speculation as a client and an operator see it."""

from __future__ import annotations

from server_harness import ServerThread

from runtime.server.config import ServerConfig


def test_speculation_shows_everywhere(artifact):
    """Usage, metrics, the live page's feed, the switch of the server and of one request."""
    config = ServerConfig(port=0, admin_keys=("admin",))
    admin = {"authorization": "Bearer admin"}
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    options = {"model": str(artifact), "num_speculative_tokens": 4, "adaptive": False}
    with ServerThread({"tiny": artifact}, config, speculative_config=options) as server, server.client() as client:
        details = client.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 10
        streamed = client.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ).text
        assert '"accepted_prediction_tokens":' in streamed
        metrics = client.get("/metrics").text
        assert (
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"}' in metrics
        )
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "draft_seconds"):
            assert f"vllm:spec_decode_{name}_total" in metrics
        plain = client.post("/v1/completions", json=body | {"speculation": False}).json()
        assert "completion_tokens_details" not in plain["usage"]
        switched = client.post("/admin/speculation", json={"enabled": False}, headers=admin).json()
        assert switched == {"model": "tiny", "enabled": False, "was": True}
        assert "completion_tokens_details" not in client.post("/v1/completions", json=body).json()["usage"]
        assert client.post("/admin/speculation", json={"enabled": "x"}, headers=admin).status_code == 400
    with ServerThread({"tiny": artifact}, config) as server, server.client() as client:
        refused = client.post("/admin/speculation", json={"enabled": True}, headers=admin)
        assert refused.status_code == 400
        assert "--speculative-config" in refused.json()["error"]["message"]
