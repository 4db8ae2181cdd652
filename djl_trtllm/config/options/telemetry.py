"""What the server reports of itself: its log and its traces."""

from __future__ import annotations

from djl_trtllm.config.options.choices import LogFormat, LogLevel
from djl_trtllm.config.options.documents import OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class TelemetryOptions(OptionGroup):
    """Options of the process (docs/logs-and-traces.md)."""

    log_format: LogFormat = option(
        LogFormat.TEXT,
        "Format of the log: lines of text, or a JSON object per line.",
        key="log_format",
        effect="format of the log; inside DJL Serving it is DJL's own",
        source=OURS,
        scope=Scope.SERVER,
    )
    log_level: LogLevel = option(
        LogLevel.INFO,
        "Least level of the lines in the log.",
        key="log_level",
        effect="level of the log; inside DJL Serving it is DJL's own",
        source=OURS,
        scope=Scope.SERVER,
    )
    request_log: bool = option(
        True,
        "Whether the log has a line for each request at its end, with its id, model, status, tokens and times, never "
        "with its text. Refusals are at most ten lines a second; the others are counted.",
        key="request_log",
        effect="a line in the log for each request",
        source=OURS,
        scope=Scope.SERVER,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Address to which traces are sent by OTLP. The environment variables of OpenTelemetry "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT` and the others) do the same. It needs the packages of `djl-trtllm[otel]`.",
        key="otlp_traces_endpoint",
        example="http://localhost:4318/v1/traces",
        default_note="that of the OTEL_* variables, else no traces",
        effect="traces of requests",
        source=OURS,
        scope=Scope.OPERATOR,
    )
