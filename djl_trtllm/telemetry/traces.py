"""Whether requests are traced, as the options and OpenTelemetry's environment variables say.

OpenTelemetry is imported only if they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry.otlp import GRPC, asked_by, is_disabled, open_signal
from djl_trtllm.telemetry.served_request import ServedRequest

_OPTION = "SERVING_OTLP_TRACES_ENDPOINT"


class Traces(Protocol):
    """Makes a trace of each request."""

    def record(self, request: ServedRequest) -> dict[str, Any]:
        """Trace a request that has ended now. Returns what the log's line says of the trace."""

    def close(self) -> None:
        """Send what waits."""


def open_traces(options: Options, environ: Mapping[str, str]) -> Traces | None:
    """None if nothing asks for traces. Raises ConfigError if they are asked for and cannot be made."""
    if is_disabled(environ):
        return None
    asked = _OPTION if options.otlp_traces_endpoint else asked_by("traces", environ)
    if asked is None:
        return None
    endpoint = _endpoint(options.otlp_traces_endpoint)

    def make(protocol: str) -> Traces:
        from djl_trtllm.telemetry.spans import SpanTraces, grpc_exporter, http_exporter

        if protocol == GRPC:
            return SpanTraces(grpc_exporter(endpoint))
        return SpanTraces(http_exporter(endpoint and _with_path(endpoint)))

    return open_signal("traces", asked, environ, make)


def _endpoint(given: str | None) -> str | None:
    if given is None:
        return None
    try:
        address = urlsplit(given)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            [f"{_OPTION}={given} (environment): expected an address such as http://localhost:4318/v1/traces"]
        )
    return given


def _with_path(endpoint: str) -> str:
    """OTLP over HTTP has a path for each kind of data."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
