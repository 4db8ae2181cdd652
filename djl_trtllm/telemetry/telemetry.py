"""Reports requests at their end: in the log, as traces and as OpenTelemetry's metrics.

The options and OpenTelemetry's environment variables say whether there are traces and metrics. OpenTelemetry is
imported only if they ask for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.logs import of_request
from djl_trtllm.telemetry.request_log import RequestLog, ServedRequest

if TYPE_CHECKING:
    from djl_trtllm.telemetry.otel import OtelMetrics, SpanTraces

logger = logging.getLogger(__name__)

_LAST_SECONDS = 3.0
"""How long the end waits for a collector."""

Signal = Literal["traces", "metrics"]
T = TypeVar("T")

HTTP, GRPC = "http/protobuf", "grpc"
_PACKAGES = {HTTP: "djl-trtllm[otel]", GRPC: "opentelemetry-exporter-otlp-proto-grpc"}
_DISABLED = "OTEL_SDK_DISABLED"
_OPTION = "SERVING_OTLP_TRACES_ENDPOINT"


def _asked_by(signal: Signal, environ: Mapping[str, str]) -> str | None:
    """Return the variable that asks for a signal; None if none does. Raises ConfigError."""
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environ.get(name, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError([f"{name}={exporter} (environment): expected otlp or none"])
    if exporter:
        return name if exporter == "otlp" else None
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((name for name in endpoints if environ.get(name)), None)


def _open(signal: Signal, environ: Mapping[str, str], given: str | None, make: Callable[[str], T]) -> T | None:
    """Return the result of `make` for the protocol that the environment names; None if nothing asks for the signal.

    `given` is the option with its endpoint. Raises ConfigError if the signal is asked for and cannot be made: the
    protocol is not known, packages are missing or OpenTelemetry refuses its variables.
    """
    if environ.get(_DISABLED, "").strip().lower() == "true":
        return None
    asked = _OPTION if given else _asked_by(signal, environ)
    if asked is None:
        return None
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if environ.get(name)), None)
    protocol = HTTP if name is None else environ[name].strip().lower()
    if protocol not in _PACKAGES:
        raise ConfigError([f"{name}={protocol} (environment): expected {HTTP} or {GRPC}"])
    try:
        return make(protocol)
    except ImportError as error:
        raise ConfigError(
            [
                f"{asked} asks for {signal}, and OpenTelemetry's packages are not installed ({error}): pip install "
                f"'{_PACKAGES[protocol]}', or unset it; {_DISABLED}=true switches {signal} off"
            ]
        ) from None
    except ValueError as error:
        raise ConfigError([f"{asked} asks for {signal}, and OpenTelemetry refuses its variables: {error}"]) from None


def open_traces(options: Options, environ: Mapping[str, str]) -> SpanTraces | None:
    """Return the traces; None if nothing asks for them. Raises ConfigError if they are asked for and cannot be made."""

    def make(protocol: str) -> SpanTraces:
        from djl_trtllm.telemetry.otel import SpanTraces, exporter

        endpoint = _usable(options.otlp_traces_endpoint)
        # OTLP over HTTP has a path for each kind of data.
        bare = endpoint is not None and protocol == HTTP and not urlsplit(endpoint).path.strip("/")
        return SpanTraces(exporter("trace", protocol, f"{endpoint}".rstrip("/") + "/v1/traces" if bare else endpoint))

    return _open("traces", environ, options.otlp_traces_endpoint, make)


def _usable(endpoint: str | None) -> str | None:
    """The endpoint. Raises ConfigError if it is no address."""
    if not endpoint:
        return None
    try:
        address = urlsplit(endpoint)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            [f"{_OPTION}={endpoint} (environment): expected an address such as http://localhost:4318/v1/traces"]
        )
    return endpoint


def open_metrics(environ: Mapping[str, str]) -> OtelMetrics | None:
    """Return the metrics; None if nothing asks for them. Raises ConfigError if they cannot be made."""

    def make(protocol: str) -> OtelMetrics:
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        from djl_trtllm.telemetry.otel import OtelMetrics, exporter

        return OtelMetrics(PeriodicExportingMetricReader(exporter("metric", protocol)))

    return _open("metrics", environ, None, make)


class Telemetry:
    """Reports requests to the log, and to OpenTelemetry as traces and metrics, each where it is given."""

    def __init__(
        self, log: RequestLog | None = None, traces: SpanTraces | None = None, metrics: OtelMetrics | None = None
    ) -> None:
        self._log = log
        self._traces = traces
        self._metrics = metrics

    @classmethod
    def open(cls, options: Options, environ: Mapping[str, str] = os.environ) -> Telemetry:
        """Return what the options and OpenTelemetry's variables ask for. Raises ConfigError."""
        return cls(RequestLog() if options.request_log else None, open_traces(options, environ), open_metrics(environ))

    @property
    def exports(self) -> bool:
        """Whether OpenTelemetry gets requests: their headers, and what they ask for, are kept for it."""
        return self._traces is not None or self._metrics is not None

    def ended(self, request: ServedRequest) -> None:
        """Report a request that has ended; errors in here are logged and do not reach it."""
        try:
            fields: dict[str, Any] = {} if self._traces is None else self._traces.record(request)
            if self._log is not None:
                self._log.write(request, fields)
            if self._metrics is not None:
                self._metrics.record(request)
        except Exception:
            logger.exception("reporting a request failed", extra=of_request(request.id))

    def ended_soon(self, request: ServedRequest) -> None:
        """Report a request from a consumer of its last chunk: the rolling batch counts a chunk after delivering it."""
        asyncio.get_running_loop().call_soon(self.ended, request)

    def close(self) -> None:
        """Write and send what waits; a collector that does not answer is not waited for."""
        if self._log is not None:
            self._log.flush()
        senders = [sender for sender in (self._traces, self._metrics) if sender is not None]
        threads = [threading.Thread(target=sender.close, name="otlp", daemon=True) for sender in senders]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _LAST_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
