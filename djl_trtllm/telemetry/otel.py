"""Traces and metrics by OpenTelemetry: imported only if they are asked for.

Both are made when a request has ended, from the times that are known then, so nothing is done for a token. Threads of
OpenTelemetry send them, and drop those that they cannot send.
"""

import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

from opentelemetry import propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from djl_trtllm.api.front_end import with_attributes
from djl_trtllm.batching.statistics import FIRST_TOKEN_SECONDS, PER_TOKEN_SECONDS
from djl_trtllm.config.sources import shortened
from djl_trtllm.telemetry.reports import GRPC, LONGEST, Generated, ServedRequest
from djl_trtllm.version import __version__

SERVICE = "djl-trtllm"


def resource() -> Resource:
    """Return the resource of the environment, with our name and version if it names no service."""
    own = {"service.name": SERVICE, "service.version": __version__}
    given = Resource.create()
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return given if named else given.merge(Resource(own))


SPAN = "llm_request"
_SERVER_ERROR = 500


def exporter(kind: Literal["trace", "metric"], protocol: str, endpoint: str | None = None) -> Any:
    """The exporter of OTLP over HTTP or gRPC, each in its own package; `endpoint` None: the environment's."""
    package = f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == GRPC else 'http'}.{kind}_exporter"
    return getattr(import_module(package), "OTLPSpanExporter" if kind == "trace" else "OTLPMetricExporter")(endpoint)


class SpanTraces:
    """Makes the spans. Sampler, limits, batches and resource are those of the environment's OTEL_* variables.

    A request has a span, with the names of the semantic conventions for generative AI and those that vLLM and
    TensorRT-LLM use, and its phases as children: receive, queue, prefill, decode.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE, __version__)

    def record(self, request: ServedRequest) -> dict[str, Any]:
        """Trace a request that has ended now, if a dialect took it. Returns what the log says of the trace."""
        if request.quiet or request.reads or not request.dialect:
            return {}
        # Times are on a clock that does not jump; the difference to that of the calendar is the present one.
        now, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()
        generated = request.generated()
        error = request.any_error()
        span = self._tracer.start_span(
            SPAN,
            # SageMaker passes no other header on.
            propagate.extract(with_attributes(request.headers)),
            SpanKind.SERVER,
            _attributes(request, generated, error, now),
            start_time=_wall(request.began, offset),
        )
        if span.is_recording():
            if _is_defect(request, error):
                span.set_status(Status(StatusCode.ERROR, error or None))
            context = trace.set_span_in_context(span)
            for name, start, end in _phases(request, generated, now):
                child = self._tracer.start_span(name, context, start_time=_wall(start, offset))
                child.end(_wall(end, offset))
        span.end(_wall(now, offset))
        found = span.get_span_context()
        return {"trace_id": trace.format_trace_id(found.trace_id), "span_id": trace.format_span_id(found.span_id)}

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()


def _wall(seconds: float, offset: int) -> int:
    return int(seconds * 1e9) + offset


def _is_defect(request: ServedRequest, error: str) -> bool:
    """Whether the server is at fault. By the conventions a refusal is no error of its span.

    A response that fails when it has begun still has the status of a success.
    """
    if error and not request.failed:
        return True
    if isinstance(request.status, int):
        return request.status >= _SERVER_ERROR
    return request.status in ("INTERNAL", "UNAVAILABLE", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED")


def _phases(request: ServedRequest, generated: Generated | None, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of the request, each with its start and end."""
    if generated is None:
        return
    end = generated.last_token or now
    yield "receive", request.began, generated.queued
    yield "queue", generated.queued, generated.started or now
    if generated.started is not None:
        yield "prefill", generated.started, generated.first_token or now
    if generated.first_token is not None:
        yield "decode", generated.first_token, end


def _attributes(request: ServedRequest, generated: Generated | None, error: str, now: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.id": request.id,
        "gen_ai.request.model": shortened(request.model, LONGEST),
        "gen_ai.latency.e2e": now - request.began,
        "url.path": shortened(request.path, LONGEST),
        "djl_trtllm.dialect": request.dialect,
    }
    if isinstance(request.status, int):
        found |= {"http.request.method": request.method, "http.response.status_code": request.status}
    else:
        found |= {"rpc.system.name": "grpc", "rpc.method": request.path, "rpc.response.status_code": request.status}
    if request.client:
        found["djl_trtllm.client"] = shortened(request.client, LONGEST)
    if error:
        found["error.type"] = error
    if request.asked is not None:
        found["gen_ai.operation.name"] = request.asked.operation
        asked = request.asked._asdict()
        found |= {f"gen_ai.request.{name}": value for name, value in asked.items() if name != "operation"}
    return found | ({} if generated is None else _usage(request, generated))


def _usage(request: ServedRequest, generated: Generated) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.response.model": request.model,
        "gen_ai.response.finish_reasons": generated.reasons,
        "gen_ai.usage.input_tokens": generated.prompt_tokens,
        "gen_ai.usage.output_tokens": generated.output_tokens,
        # As vLLM and TensorRT-LLM call them.
        "gen_ai.usage.prompt_tokens": generated.prompt_tokens,
        "gen_ai.usage.completion_tokens": generated.output_tokens,
    }
    if generated.accepted_tokens is not None:
        found["djl_trtllm.usage.accepted_tokens"] = generated.accepted_tokens
    if generated.drafted_tokens is not None:
        found["djl_trtllm.usage.drafted_tokens"] = generated.drafted_tokens
    if generated.started is not None:
        found["gen_ai.latency.time_in_queue"] = generated.started - generated.queued
    if generated.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = generated.first_token - request.began
    return found


DURATION = "gen_ai.server.request.duration"
FIRST = "gen_ai.server.time_to_first_token"
EACH = "gen_ai.server.time_per_output_token"
USAGE = "gen_ai.client.token.usage"

_BUCKETS = {
    DURATION: tuple(0.01 * 2**power for power in range(14)),
    # The conventions have the first of TensorRT-LLM's buckets.
    FIRST: tuple(bound for bound in FIRST_TOKEN_SECONDS if bound <= 10.0),
    EACH: tuple(bound for bound in PER_TOKEN_SECONDS if bound <= 2.5),
    USAGE: tuple(4**power for power in range(14)),
}


class OtelMetrics:
    """Records requests. Interval, limits and resource are those of the environment's OTEL_* variables.

    Metrics have the names, units and buckets of the semantic conventions.
    """

    def __init__(self, reader: MetricReader) -> None:
        views = [
            View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(buckets))
            for name, buckets in _BUCKETS.items()
        ]
        self._provider = MeterProvider([reader], resource=resource(), shutdown_on_exit=False, views=views)
        meter = self._provider.get_meter(SERVICE, __version__)
        self._duration = meter.create_histogram(DURATION, "s", "Seconds from arrival to the end of a request.")
        self._first_token = meter.create_histogram(FIRST, "s", "Seconds from arrival to the first token.")
        self._per_token = meter.create_histogram(EACH, "s", "Mean seconds between the tokens of a request.")
        self._tokens = meter.create_histogram(USAGE, "{token}", "Tokens of a request, by their type.")

    def record(self, request: ServedRequest) -> None:
        """Count a request that has ended now, if a dialect took it."""
        if request.quiet or request.reads or not request.dialect:
            return
        generated = request.generated()
        error = request.any_error()
        if request.failed:
            error = error or str(request.status)
        attributes: dict[str, Any] = {"gen_ai.provider.name": SERVICE}
        if request.asked is not None:
            # Else the model may be any name that a client has made up.
            attributes["gen_ai.operation.name"] = request.asked.operation
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = request.model
        outcome = attributes | ({"error.type": error} if error else {})
        self._duration.record(time.monotonic() - request.began, outcome)
        if generated is None:
            return
        for kind, tokens in (("input", generated.prompt_tokens), ("output", generated.output_tokens)):
            self._tokens.record(tokens, {**attributes, "gen_ai.token.type": kind})
        if error:
            return
        if generated.first_token is not None:
            self._first_token.record(generated.first_token - request.began, attributes)
        for state in request.generations:
            seconds = state.record.time_per_output_token
            if seconds is not None:
                self._per_token.record(seconds, attributes)

    def close(self) -> None:
        """Send the recorded metrics."""
        self._provider.shutdown()
