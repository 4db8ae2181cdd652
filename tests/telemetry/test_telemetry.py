from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import export as metrics_export
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from djl_trtllm.config import load
from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry import ServedRequest, Telemetry, otel, reports
from djl_trtllm.telemetry.reports import (
    RequestLog,
    Signal,
    open_metrics,
    open_traces,
)
from tests.support.tables import by_table
from tests.support.virtual_time import in_real_time
from tests.telemetry.requests import served, state

# What asks OpenTelemetry for traces and metrics.


@pytest.fixture(params=["traces", "metrics"])
def signal(request: pytest.FixtureRequest) -> Signal:
    found: Signal = request.param
    return found


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str | None]]:
    """The kind, protocol and endpoint of what was opened; nothing is sent."""
    found: list[tuple[str, str, str | None]] = []

    def exporter(kind: str, protocol: str, endpoint: str | None = None) -> SpanExporter:
        found.append((kind, protocol, endpoint))
        return InMemorySpanExporter()

    monkeypatch.setattr(otel, "exporter", exporter)
    monkeypatch.setattr(metrics_export, "PeriodicExportingMetricReader", lambda exporter: InMemoryMetricReader())
    return found


def opens(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Open a signal; NAME in a variable's name is the signal's."""
    own = {name.replace("NAME", signal.upper()): value for name, value in environ.items()}
    found = open_traces(load(None, own).options, own) if signal == "traces" else open_metrics(own)
    if found is not None:
        found.close()
    return found is not None


X = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}


@by_table("environ", "protocol", apart=True)
def test_opentelemetrys_variables_ask_for_a_signal_and_say_its_protocol(
    signal: Signal, environ: Mapping[str, str], protocol: str | None, exported: list[tuple[str, str, str | None]]
) -> None:
    assert opens(signal, environ) == (protocol is not None)
    assert exported == ([] if protocol is None else [(signal.removesuffix("s"), protocol, None)])


@by_table("environ", "message", apart=True)
def test_what_cannot_be_done_is_an_error_that_names_the_setting(
    signal: Signal, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        opens(signal, environ)
    assert caught.value.problems == (message.replace("NAME", signal.upper()),)


@pytest.mark.parametrize(
    ("error", "protocol", "remedy"),
    [
        (ImportError("no module"), "http/protobuf", "pip install 'djl-trtllm[otel]', or unset it"),
        (ImportError("no module"), "grpc", "pip install 'opentelemetry-exporter-otlp-proto-grpc', or unset it"),
        (ValueError("an odd interval"), "grpc", "OpenTelemetry refuses its variables: an odd interval"),
    ],
)
def test_what_does_not_open_is_an_error_with_its_reason(
    signal: Signal, error: Exception, protocol: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(otel, "exporter", fails)
    with pytest.raises(ConfigError) as caught:
        opens(signal, X | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    (problem,) = caught.value.problems
    assert problem.startswith(f"OTEL_EXPORTER_OTLP_ENDPOINT asks for {signal}, and OpenTelemetry")
    assert remedy in problem
    assert isinstance(error, ValueError) or f"OTEL_SDK_DISABLED=true switches {signal} off" in problem


@by_table("given", "more", "used", apart=True)
def test_traces_go_to_the_endpoint_of_the_option(
    given: str, more: dict[str, str], used: str, exported: list[tuple[str, str, str | None]]
) -> None:
    assert opens("traces", {"SERVING_OTLP_TRACES_ENDPOINT": given, **more})
    assert [endpoint for _, _, endpoint in exported] == [used]
    assert not opens("traces", {"SERVING_OTLP_TRACES_ENDPOINT": given, "OTEL_SDK_DISABLED": "true"})
    assert not opens("metrics", {"SERVING_OTLP_TRACES_ENDPOINT": given, **more})


@pytest.mark.parametrize("given", ["collector:4318", "http://:4318", "http://x:port", "http://x:0"])
def test_an_endpoint_is_an_address(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opens("traces", {"SERVING_OTLP_TRACES_ENDPOINT": given})
    assert f"SERVING_OTLP_TRACES_ENDPOINT={given} (environment): expected an address" in str(caught.value)


def test_a_model_cannot_send_traces_somewhere() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, arguments=["otlp_traces_endpoint=http://attacker"])
    assert "SERVING_OTLP_TRACES_ENDPOINT" in str(caught.value)


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for() -> None:
    program = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "from djl_trtllm.config import load\n"
        "from djl_trtllm.server import app\n"
        "from djl_trtllm.telemetry import Telemetry\n"
        "Telemetry.open(load(None, {}).options, {}).close()\n"
        "environ = {'SERVING_OTLP_TRACES_ENDPOINT': 'http://x'}\n"
        "Telemetry.open(load(None, environ).options, environ)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    error = result.stderr.splitlines()[-1]
    assert "SERVING_OTLP_TRACES_ENDPOINT asks for traces" in error and "pip install 'djl-trtllm[otel]'" in error


class Traced:
    """Traces or metrics that are kept."""

    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[ServedRequest] = []
        self.closed = False
        self._error = error

    def record(self, request: ServedRequest) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        self.requests.append(request)
        return {"trace_id": "7"}

    def close(self) -> None:
        self.closed = True


def telemetry_of(log: RequestLog | None = None, traces: Any = None, metrics: Any = None) -> Telemetry:
    return Telemetry(log, traces, metrics)


def test_what_requests_have_for_opentelemetry_is_kept_where_one_signal_is_sent() -> None:
    assert [telemetry_of(None, *given).exports for given in ((), (Traced(),), (None, Traced()))] == [
        False,
        True,
        True,
    ]


def report(telemetry: Telemetry, request: ServedRequest) -> None:
    async def ended() -> None:
        telemetry.ended(request)

    asyncio.run(ended())


def test_the_line_of_a_request_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    traced = Traced()
    request = served(state())
    telemetry = telemetry_of(RequestLog(), traced)
    report(telemetry, request)
    assert traced.requests == [request]
    assert caplog.records[0].getMessage().endswith(" trace_id=7")
    telemetry.close()
    assert traced.closed


def test_a_request_is_measured_with_and_without_a_line_and_a_trace() -> None:
    for log, traced in ((None, None), (RequestLog(), Traced())):
        measured = Traced()
        request = served(state())
        telemetry = telemetry_of(log, traced, measured)
        report(telemetry, request)
        assert measured.requests == [request]
        telemetry.close()
        assert measured.closed


def test_the_end_waits_for_what_is_sent_but_not_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    waited: list[float] = []

    class Waiting(Traced):
        def close(self) -> None:
            assert threading.current_thread().daemon, "the process ends without it"
            answers.wait(60)
            self.closed = True

    def join(thread: threading.Thread, timeout: float) -> None:
        waited.append(timeout)
        if answers.is_set():
            joined(thread)

    joined = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic=iter((10.0, 10.0, 12.0, 0, 0, 9)).__next__))
    traced, metrics = Waiting(), Traced()
    telemetry_of(None, traced, metrics).close()
    assert not traced.closed
    assert waited == [3.0, 1.0], "together"
    answers.set()
    traced = Waiting()
    telemetry_of(None, traced, metrics).close()
    assert traced.closed
    assert waited[2:] == [3.0, 0.0]


def test_the_log_of_requests_may_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    environ = {"SERVING_REQUEST_LOG": "false"}
    report(Telemetry.open(load(None, environ).options, environ), served(state()))
    assert [line for line in caplog.records if line.name == "djl_trtllm.requests"] == []


def test_the_log_of_requests_is_on_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report(Telemetry.open(load(None, {}).options, {}), served(state()))
    assert len(caplog.records) == 1


def test_what_goes_wrong_while_telling_does_not_reach_the_request(caplog: pytest.LogCaptureFixture) -> None:
    report(telemetry_of(RequestLog(), Traced(ValueError("wrong"))), served(state()))
    assert [line.levelname for line in caplog.records] == ["ERROR"]
    assert caplog.records[0].request_id == "r-1"  # type: ignore[attr-defined]


async def test_what_is_reported_soon_has_what_happens_until_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request = served(state(), status=499)
    Telemetry(RequestLog()).ended_soon(request)
    request.status = 200
    await asyncio.sleep(0)
    assert caplog.records[0].getMessage().startswith("POST /invocations 200 ")


@in_real_time
async def test_the_end_writes_how_many_requests_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    telemetry = Telemetry(RequestLog())
    for _ in range(11):
        telemetry.ended(served(status=503))
    telemetry.close()
    assert caplog.records[-1].getMessage().endswith(" have no line: 1 with 503")
