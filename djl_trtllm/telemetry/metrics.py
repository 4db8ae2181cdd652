"""Whether OpenTelemetry's metrics of requests are sent, as its environment variables say.

OpenTelemetry is imported only if they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from djl_trtllm.telemetry.otlp import asked_by, open_signal
from djl_trtllm.telemetry.served_request import ServedRequest


class Metrics(Protocol):
    """Counts requests."""

    def record(self, request: ServedRequest) -> None:
        """Count a request that has ended now."""

    def close(self) -> None:
        """Send what was recorded."""


def open_metrics(environ: Mapping[str, str]) -> Metrics | None:
    """None if nothing asks for metrics. Raises ConfigError if they are asked for and cannot be made."""
    asked = asked_by("metrics", environ)
    if asked is None:
        return None

    def make(protocol: str) -> Metrics:
        from djl_trtllm.telemetry.otel_metrics import OtelMetrics, periodic_reader

        return OtelMetrics(periodic_reader(protocol))

    return open_signal("metrics", asked, environ, make)
