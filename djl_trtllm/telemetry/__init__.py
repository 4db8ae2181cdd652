"""What a front end reports of a request at its end: a line in the log, and a trace."""

from djl_trtllm.telemetry.request_log import ServedRequest
from djl_trtllm.telemetry.telemetry import Telemetry

__all__ = ["ServedRequest", "Telemetry"]
