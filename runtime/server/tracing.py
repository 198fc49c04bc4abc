"""OpenTelemetry traces over OTLP/HTTP: a span a generation, under vLLM names. Not imported unless asked for."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from runtime.errors import PlancastError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.server.tracking import Record

# The caller's trace headers, for the spans of its request.
carrier: ContextVar[Mapping[str, str] | None] = ContextVar("trace_carrier", default=None)


class Tracer:
    """Sends spans to a collector in the background. Raises `PlancastError` where the packages are not installed."""

    def __init__(self, endpoint: str):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise PlancastError(
                f"traces need OpenTelemetry, which is not installed ({error}): pip install 'plancast[otel]'"
            ) from None
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._provider = TracerProvider(resource=Resource.create({"service.name": "plancast"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("plancast.server")
        self._propagator = TraceContextTextMapPropagator()
        # Records are in monotonic seconds, spans in nanoseconds since 1970.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def finished(self, record: Record) -> None:
        """Report a generation that is over."""
        now = time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier.get() or {}),
            start_time=self._nanoseconds(record.arrival),
            attributes={
                "gen_ai.request.id": record.request_id,
                "gen_ai.response.model": record.model,
                "gen_ai.request.n": record.params.n,
                "gen_ai.request.temperature": record.params.temperature,
                "gen_ai.request.top_p": record.params.top_p,
                "gen_ai.usage.prompt_tokens": record.prompt_tokens,
                "gen_ai.usage.completion_tokens": record.output_tokens,
                "gen_ai.latency.e2e": now - record.arrival,
                "plancast.route": record.route,
                "plancast.cached_tokens": record.cached_tokens,
                "plancast.finish_reasons": list(record.finish_reasons.values()),
            },
        )
        if record.params.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", record.params.max_tokens)
        if record.scheduled is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", record.scheduled - record.arrival)
        if record.ttft is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", record.ttft)
        span.end(self._nanoseconds(now))

    def _nanoseconds(self, monotonic: float) -> int:
        return self._epoch_ns + int(monotonic * 1e9)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
