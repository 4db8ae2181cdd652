"""The reports of a front end at the end of a request: a line in the log, and a trace."""

from djl_trtllm.telemetry.reports import ServedRequest, Telemetry

__all__ = ["ServedRequest", "Telemetry"]
