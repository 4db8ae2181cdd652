"""Reports requests at their end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from djl_trtllm.config import Options
from djl_trtllm.logs import of_request
from djl_trtllm.telemetry.metrics import Metrics, open_metrics
from djl_trtllm.telemetry.request_log import RequestLog
from djl_trtllm.telemetry.served_request import ServedRequest
from djl_trtllm.telemetry.traces import Traces, open_traces

logger = logging.getLogger(__name__)

_LAST_SECONDS = 3.0
"""How long the end waits for a collector."""


class Telemetry:
    """The log's lines, the traces and OpenTelemetry's metrics of requests; without any it does nothing."""

    def __init__(
        self, log: RequestLog | None = None, traces: Traces | None = None, metrics: Metrics | None = None
    ) -> None:
        self._log = log
        self._traces = traces
        self._metrics = metrics

    @classmethod
    def open(cls, options: Options, environ: Mapping[str, str] = os.environ) -> Telemetry:
        """As the options and OpenTelemetry's variables say. Raises ConfigError."""
        return cls(RequestLog() if options.request_log else None, open_traces(options, environ), open_metrics(environ))

    @property
    def reads_headers(self) -> bool:
        """Whether the end of a request needs its headers."""
        return self._traces is not None

    def ended(self, request: ServedRequest) -> None:
        """A request has ended; nothing that goes wrong here reaches it."""
        try:
            fields: dict[str, Any] = {} if self._traces is None else self._traces.record(request)
            if self._log is not None:
                self._log.write(request, fields)
            if self._metrics is not None:
                self._metrics.record(request)
        except Exception:
            logger.exception("reporting a request failed", extra=of_request(request.id))

    def ended_soon(self, request: ServedRequest) -> None:
        """The same from a consumer of chunks: the rolling batch counts what it delivers after it has delivered it."""
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
