"""Traces by OpenTelemetry: imported only if they are asked for.

A span for each request, with the names of the semantic conventions for generative AI and those that vLLM and
TensorRT-LLM use, and its phases as children: receive, queue, prefill, decode. They are made when the request has ended,
from the times that are known then, so nothing is done for a token. A thread of OpenTelemetry sends them; what it cannot
send is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from djl_trtllm.config.masking import shortened
from djl_trtllm.telemetry.resource import SERVICE, resource
from djl_trtllm.telemetry.served_request import LONGEST, Generated, ServedRequest
from djl_trtllm.version import __version__

SPAN = "llm_request"
_SERVER_ERROR = 500


def http_exporter(endpoint: str | None) -> SpanExporter:
    """OTLP over HTTP, to the address that the environment has if there is no `endpoint`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint)


def grpc_exporter(endpoint: str | None) -> SpanExporter:
    """OTLP over gRPC, which has a package of its own."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter


class SpanTraces:
    """Makes the spans. Sampler, limits, batches and resource are those of the environment's OTEL_* variables."""

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
        error = request.error or ("" if generated is None else generated.error)
        span = self._tracer.start_span(
            SPAN,
            propagate.extract(request.headers),
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
        """Send what waits."""
        self._provider.shutdown()


def _wall(seconds: float, offset: int) -> int:
    return int(seconds * 1e9) + offset


def _is_defect(request: ServedRequest, error: str) -> bool:
    """Whether the server is at fault: by the conventions, a refusal is no error of its span.

    A response that fails when it has begun still has the status of a success.
    """
    if error and not request.failed:
        return True
    if isinstance(request.status, int):
        return request.status >= _SERVER_ERROR
    return request.status in ("INTERNAL", "UNAVAILABLE", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED")


def _phases(request: ServedRequest, generated: Generated | None, now: float) -> Iterator[tuple[str, float, float]]:
    """The phases that the request has had, each with its start and end."""
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
    if generated.started is not None:
        found["gen_ai.latency.time_in_queue"] = generated.started - generated.queued
    if generated.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = generated.first_token - request.began
    return found
