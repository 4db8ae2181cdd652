"""Whether requests are traced, as the options and OpenTelemetry's environment variables say.

OpenTelemetry is imported only if they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry.served_request import ServedRequest

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_DISABLED = "OTEL_SDK_DISABLED"
_HTTP, _GRPC = "http/protobuf", "grpc"
_PACKAGES = {_HTTP: "djl-trtllm[otel]", _GRPC: "opentelemetry-exporter-otlp-proto-grpc"}
_OFF = f"or unset it; {_DISABLED}=true switches traces off"


class Traces(Protocol):
    """Makes a trace of each request."""

    def record(self, request: ServedRequest) -> dict[str, Any]:
        """Trace a request that has ended now. Returns what the log's line says of the trace."""

    def close(self) -> None:
        """Send what waits, if that does not take long."""


def open_traces(options: Options, environ: Mapping[str, str]) -> Traces | None:
    """None if nothing asks for traces. Raises ConfigError if they are asked for and cannot be made."""
    asked_by = _asked_by(options, environ)
    if asked_by is None:
        return None
    endpoint = _endpoint(options.otlp_traces_endpoint)
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _HTTP).strip().lower()
    if protocol not in _PACKAGES:
        name = next(name for name in _PROTOCOLS if environ.get(name))
        raise ConfigError([f"{name}={protocol} (environment): expected {_HTTP} or {_GRPC}"])
    try:
        from djl_trtllm.telemetry.spans import SpanTraces, grpc_exporter, http_exporter

        if protocol == _GRPC:
            return SpanTraces(grpc_exporter(endpoint))
        return SpanTraces(http_exporter(endpoint and _with_path(endpoint)))
    except ImportError as error:
        raise ConfigError(
            [
                f"{asked_by} asks for traces, and OpenTelemetry's packages are not installed ({error}): pip install "
                f"'{_PACKAGES[protocol]}', {_OFF}"
            ]
        ) from None
    except ValueError as error:
        raise ConfigError([f"{asked_by} asks for traces, and OpenTelemetry refuses its variables: {error}"]) from None


def _asked_by(options: Options, environ: Mapping[str, str]) -> str | None:
    """The setting that asks for traces."""
    if environ.get(_DISABLED, "").strip().lower() == "true":
        return None
    if options.otlp_traces_endpoint:
        return "SERVING_OTLP_TRACES_ENDPOINT"
    exporter = environ.get(_EXPORTER, "").strip().lower()
    if exporter == "none":
        return None
    if exporter and exporter != "otlp":
        raise ConfigError([f"{_EXPORTER}={exporter} (environment): expected otlp or none"])
    return _EXPORTER if exporter else next((name for name in _ENDPOINTS if environ.get(name)), None)


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
            [
                f"SERVING_OTLP_TRACES_ENDPOINT={given} (environment): expected an address such as "
                "http://localhost:4318/v1/traces"
            ]
        )
    return given


def _with_path(endpoint: str) -> str:
    """OTLP over HTTP has a path for each kind of data."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
