"""Prometheus metrics under vLLM's names and labels, and TGI's counters, so that existing boards work.

Histograms are observed as requests go by. Gauges and counters of the engine are read when they are scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from runtime.manifest import Manifest
    from runtime.messages import EngineStats
    from runtime.server.tracking import Record

LABELS = ("model_name", "engine")
ENGINE = "0"

# Bucket bounds as in vLLM (seconds).
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_N = (1, 2, 5, 10, 20)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to first token", _TTFT),
    "inter_token_latency_seconds": ("Time between a sequence's tokens", _TPOT),
    "time_per_output_token_seconds": ("The same under vLLM's older name", _TPOT),
    "request_time_per_output_token_seconds": ("Mean time per output token of a request", _TPOT),
    "e2e_request_latency_seconds": ("End-to-end latency", _LATENCY),
    "request_queue_time_seconds": ("Time waiting to be scheduled", _LATENCY),
    "request_prefill_time_seconds": ("Time from being scheduled to the first token", _LATENCY),
    "request_decode_time_seconds": ("Time from the first token to the last", _LATENCY),
    "request_inference_time_seconds": ("Time from being scheduled to the last token", _LATENCY),
    "request_prompt_tokens": ("Prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("Output tokens of a request", _TOKENS),
    "request_max_num_generation_tokens": ("Output tokens that a request asked for", _TOKENS),
    "request_params_n": ("The parameter n", _N),
    "request_params_max_tokens": ("The parameter max_tokens", _TOKENS),
}

# EngineStats attribute -> (metric, help).
_GAUGES = {
    "num_running": ("num_requests_running", "Requests in the batch"),
    "num_waiting": ("num_requests_waiting", "Requests waiting for the batch"),
    "num_spilled_blocks": ("num_spilled_blocks", "Evicted prefix-cache blocks that the swap file keeps"),
}
_COUNTERS = {
    "preemptions": ("num_preemptions", "Preemptions"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
    "generation_tokens": ("generation_tokens", "Tokens generated"),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache"),
    "spilled_blocks": ("spilled_blocks", "Evicted prefix-cache blocks written to the swap file"),
    "restored_blocks": ("restored_blocks", "Prefix-cache blocks that a hit brought back from the swap file"),
    "swapped_out_blocks": ("swapped_out_blocks", "KV blocks written to the swap file"),
    "swapped_in_blocks": ("swapped_in_blocks", "KV blocks read from the swap file"),
    "requests_in_slo": ("requests_in_slo", "Requests that met ttft_slo and tpot_slo (goodput)"),
    "tokens_in_slo": ("tokens_in_slo", "Output tokens of requests that met ttft_slo and tpot_slo"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Speculative drafts"),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted"),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafted tokens accepted"),
    "spec_decode_draft_seconds": ("spec_decode_draft_seconds", "Time spent on drafting"),
}


class _EngineCollector(Collector):
    """Turns the engines' snapshots, put here just before a scrape, into metric families."""

    def __init__(self) -> None:
        self.snapshots: dict[str, tuple[Manifest, EngineStats]] = {}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for attribute, (name, text) in _GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text, attribute)
        for attribute, (name, text) in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, attribute)
        yield self._accepted_per_position()
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all", labels=LABELS)
        info_labels = (*LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype")
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's configuration", labels=info_labels)
        for model, (manifest, stats) in self.snapshots.items():
            used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
            usage.add_metric((model, ENGINE), used)
            caching = str(manifest.defaults.enable_prefix_caching)
            dtype = manifest.kv.layers[0].key_dtype if manifest.kv.layers else ""
            labels = (model, ENGINE, str(stats.block_size), str(stats.num_blocks), caching, dtype)
            info.add_metric(labels, 1)
        yield usage
        yield info

    def _accepted_per_position(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in the draft",
            labels=(*LABELS, "position"),
        )
        for model, (_, stats) in self.snapshots.items():
            for position, count in enumerate(stats.spec_decode_num_accepted_tokens_per_pos):
                family.add_metric((model, ENGINE, str(position)), count)
        return family

    def _family(self, kind: type, name: str, text: str, attribute: str) -> Metric:
        family = kind(f"vllm:{name}", text, labels=LABELS)
        for model, (_, stats) in self.snapshots.items():
            family.add_metric((model, ENGINE), getattr(stats, attribute))
        return family


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self.registry.register(self._engines)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        reason = (*LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests", reason, registry=self.registry)
        self._tgi_count = Counter("tgi_request_count", "Requests received", registry=self.registry)
        self._tgi_success = Counter("tgi_request_success", "Requests answered", registry=self.registry)
        self._tgi_failure = Counter("tgi_request_failure", "Requests refused", ("err",), registry=self.registry)
        self._tgi_duration = Histogram("tgi_request_duration", "Seconds", buckets=_LATENCY, registry=self.registry)
        self._tgi_tokens = Histogram("tgi_request_generated_tokens", "Tokens", buckets=_TOKENS, registry=self.registry)
        self._children: dict[tuple[str, str], Histogram] = {}

    def _observe(self, name: str, model: str, value: float) -> None:
        child = self._children.get((name, model))
        if child is None:
            child = self._children[name, model] = self._histograms[name].labels(model, ENGINE)
        child.observe(value)

    def started(self, record: Record) -> None:
        self._tgi_count.inc()
        self._observe("request_prompt_tokens", record.model, record.prompt_tokens)
        self._observe("request_params_n", record.model, record.params.n)
        if record.params.max_tokens is not None:
            self._observe("request_params_max_tokens", record.model, record.params.max_tokens)
            self._observe("request_max_num_generation_tokens", record.model, record.params.max_tokens)

    def first_token(self, record: Record) -> None:
        assert record.first_token is not None
        self._observe("time_to_first_token_seconds", record.model, record.first_token - record.arrival)

    def next_tokens(self, record: Record, seconds: float) -> None:
        self._observe("inter_token_latency_seconds", record.model, seconds)
        self._observe("time_per_output_token_seconds", record.model, seconds)

    def finished(self, record: Record) -> None:
        """Count the end of a request; one that was aborted or failed counts as such and enters no latency."""
        model, now = record.model, time.monotonic()
        complete = len(record.finish_reasons) >= record.params.n
        for reason in record.finish_reasons.values() if complete else ("abort",):
            self._success.labels(model, ENGINE, reason).inc()
        if not complete:
            return
        self._observe("request_generation_tokens", model, record.output_tokens)
        self._observe("e2e_request_latency_seconds", model, now - record.arrival)
        self._tgi_success.inc()
        self._tgi_duration.observe(now - record.arrival)
        self._tgi_tokens.observe(record.output_tokens)
        if record.first_token is None or record.last_token is None:
            return
        scheduled = record.scheduled if record.scheduled is not None else record.arrival
        self._observe("request_queue_time_seconds", model, scheduled - record.arrival)
        self._observe("request_prefill_time_seconds", model, record.first_token - scheduled)
        self._observe("request_decode_time_seconds", model, record.last_token - record.first_token)
        self._observe("request_inference_time_seconds", model, record.last_token - scheduled)
        if (tpot := record.tpot) is not None:
            self._observe("request_time_per_output_token_seconds", model, tpot)

    def failed(self, error_type: str) -> None:
        self._tgi_failure.labels(error_type).inc()

    def render(self, accept: str, engines: dict[str, tuple[Manifest, EngineStats]]) -> tuple[bytes, str]:
        """The exposition text and its content type, as the scraper's `accept` asks for it."""
        self._engines.snapshots = engines
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type
