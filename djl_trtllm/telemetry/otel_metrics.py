"""Metrics by OpenTelemetry: imported only if they are asked for.

They have the names, units and buckets of the semantic conventions for generative AI, and are recorded when a request
has ended, so nothing is done for a token. A thread of OpenTelemetry sends them.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

from djl_trtllm.telemetry.otlp import GRPC
from djl_trtllm.telemetry.resource import SERVICE, resource
from djl_trtllm.telemetry.served_request import ServedRequest
from djl_trtllm.version import __version__

DURATION = "gen_ai.server.request.duration"
FIRST = "gen_ai.server.time_to_first_token"
EACH = "gen_ai.server.time_per_output_token"
USAGE = "gen_ai.client.token.usage"

_BUCKETS = {
    DURATION: tuple(0.01 * 2**power for power in range(14)),
    FIRST: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    EACH: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    USAGE: tuple(4**power for power in range(14)),
}


def periodic_reader(protocol: str) -> MetricReader:
    """Sends by OTLP, as often and to where the environment says."""
    exporter: MetricExporter
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter()
    return PeriodicExportingMetricReader(exporter)


class OtelMetrics:
    """Records requests. Interval, limits and resource are those of the environment's OTEL_* variables."""

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
        error = request.error or ("" if generated is None else generated.error)
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
        """Send what was recorded."""
        self._provider.shutdown()
