"""Reports requests at their end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from djl_trtllm.config import Options
from djl_trtllm.logs import of_request
from djl_trtllm.telemetry.request_log import RequestLog
from djl_trtllm.telemetry.served_request import ServedRequest
from djl_trtllm.telemetry.traces import Traces, open_traces

logger = logging.getLogger(__name__)


class Telemetry:
    """The log's lines and the traces of requests; without either it does nothing."""

    def __init__(self, log: RequestLog | None = None, traces: Traces | None = None) -> None:
        self._log = log
        self._traces = traces

    @classmethod
    def open(cls, options: Options, environ: Mapping[str, str] = os.environ) -> Telemetry:
        """As the options and OpenTelemetry's variables say. Raises ConfigError."""
        return cls(RequestLog() if options.request_log else None, open_traces(options, environ))

    def ended(self, request: ServedRequest) -> None:
        """A request has ended; nothing that goes wrong here reaches it."""
        try:
            fields: dict[str, Any] = {} if self._traces is None else self._traces.record(request)
            if self._log is not None:
                self._log.write(request, fields)
        except Exception:
            logger.exception("reporting a request failed", extra=of_request(request.id))

    def ended_soon(self, request: ServedRequest) -> None:
        """The same from a consumer of chunks: the rolling batch counts what it delivers after it has delivered it."""
        asyncio.get_running_loop().call_soon(self.ended, request)

    def close(self) -> None:
        """Write and send what waits, if that does not take long."""
        if self._log is not None:
            self._log.flush()
        if self._traces is not None:
            self._traces.close()
