"""What a front end reports of a request at its end: a line in the log, and a trace."""

from djl_trtllm.telemetry.reports import ServedRequest, Telemetry

__all__ = ["ServedRequest", "Telemetry"]
